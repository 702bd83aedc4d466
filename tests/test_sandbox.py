"""The sandbox: honest programs pass, hostile ones score nothing, and no program leaves anything to the next one."""

import multiprocessing
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections import namedtuple
from pathlib import Path
from textwrap import dedent

import pytest

import sandbox
from sandbox import Verdict, check

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs Linux or macOS")
LINUX = sys.platform == "linux"
MARK = "sandbox-test-mark"  # in the name of every file or process that a hostile program makes
HONEST = "def f(n):\n    return n * (n + 1)\n"
HONEST_TESTS = [((n,), n * (n + 1)) for n in range(3)]
SECRETS = [((n,), f"answer-{n}-{random.Random(n).random()}") for n in (3, 5)]  # what hostile programs hunt for


def passed(source, tests, entry="f", seconds=2.0):
    return [v.passed for v in check(dedent(source), entry, tests, seconds)]


def said(source, tests, entry="f", seconds=2.0):
    return [v.said for v in check(dedent(source), entry, tests, seconds)]


def processes():
    """{id: state} of this project's helpers and their children, zombies too, and of whatever carries the mark."""
    found, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line, state = (folder / "cmdline").read_text(), (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[folder.name] = state[1], state[0]
        if os.path.abspath(sandbox.__file__) + "\0--serve" in line or MARK in line:
            found[folder.name] = state[0]
    return found | {p: state for p, (parent, state) in parents.items() if parent in found and state == "Z"}


def nothing_is_left():
    """The helper (walled, two processes) and the candidate that waits for the next check; no marked file."""
    expected = 2 if "network" in sandbox._helper.ready else 3
    deadline = time.monotonic() + 1  # the next candidate is forked after the verdict is out
    while LINUX and len(processes()) < expected and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not LINUX or len(found := processes()) == expected and "Z" not in found.values()
    places = {"/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~"), os.getcwd(), os.path.dirname(sandbox.__file__), "/"}
    assert not [path for place in places if os.path.isdir(place) for path in Path(place).glob(MARK + "*")]
    return True


@pytest.fixture
def bare(monkeypatch):
    """The sandbox as it is where namespaces are forbidden; its own helper, ended afterwards."""
    sandbox._close()
    monkeypatch.setattr(sandbox, "_modes", ("bare",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    sandbox._close()


@pytest.fixture(scope="module")
def walled():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(HONEST, "f", HONEST_TESTS)
    if "network" in sandbox._helper.ready:
        pytest.skip("this system allows no namespaces: files, network and other processes are not covered")


# -- honest programs -------------------------------------------------------------------------------------


VALUES = [
    None, True, False, 0, -7, 2**70, 10**5000, 0.1, -1e300, float("inf"), float("nan"), "", "a\n\0\ud800\U0001f600é→", [], (), {},
    [1, (2, [3.0]), {"k": {1: None, (1, True): "x"}}], [[]] * 3, list(range(20_000)),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(type(v).__name__))
def test_plain_data_survives_the_way_there_and_back(value):
    """I97, L107: ints of more than 4300 digits, NaN, lone surrogates and non-ASCII text included."""
    assert check("def f(x):\n    return x\n", "f", [((value,), value)]) == [Verdict(True, "")]


def test_a_wrong_value_is_shown_with_call_and_expectation():
    assert said("def f(x): return sum(x)", [(([3, 1],), -4)]) == ["f([3, 1]) returned 4, expected -4"]


def test_types_are_strict_and_floats_have_a_tolerance():
    """I85, I97: True, 1 and 1.0 differ, list and tuple differ; floats agree to 1e-6 and not to 1e-3."""
    cases = [(1, True), (True, 1), (1, 1.0), (1.0, 1), ([1], (1,)), ((), []), ({1: 0}, {True: 0}), ("1", 1), (None, 0)]
    for returned, wanted in cases:
        assert passed(f"def f(): return {returned!r}", [((), wanted)]) == [False], (returned, wanted)
    assert passed("def f(x): return x", [(([0.1 + 0.2],), [0.3]), ((0.333333,), 1 / 3), ((0.501,), 0.5)]) == [True, True, False]
    assert passed("def f(): return {2: 'b', 1: 'a'}", [((), {1: "a", 2: "b"})]) == [True]


def test_an_error_gives_the_last_lines_of_its_traceback_and_the_other_tests_still_run():
    source = "def g(x):\n    return 1 // x\n\ndef f(x):\n    return g(x)\n"
    right, wrong = check(source, "f", [((1,), 1), ((0,), 0)])
    assert right.passed and wrong.said.endswith("ZeroDivisionError: integer division or modulo by zero")
    assert 'File "<solution>", line 2, in g\n    return 1 // x' in wrong.said and "sandbox.py" not in wrong.said


def test_arguments_are_new_for_each_call():
    source = "def f(x):\n    x.append(1)\n    return len(x)\n"
    argument = [5]
    assert passed(source, [((argument,), 2)] * 3) == [True] * 3 and argument == [5]


def test_recursion_imports_and_state_between_tests_work():
    source = """
        import collections, heapq, json, re, datetime
        from functools import lru_cache
        @lru_cache(None)
        def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
        def f(n): return [fib(n), json.loads('[1]')[0], datetime.date(2024, 1, n).isoformat()]
    """
    assert passed(source, [((20,), [6765, 1, "2024-01-20"])]) == [True]


@pytest.mark.parametrize("what", ["(i for i in [1])", "{1, 2}", "range(3)", "b'x'", "1j", "f", "[object()]", "{(1,): {3}}"])
def test_what_is_not_plain_data_is_refused_clearly(what):
    (text,) = said(f"def f(): return {what}", [((), [1])])
    assert text.startswith("f(): returned a value of type ") and text.endswith(", which is not plain data")


def test_what_a_task_cannot_mean_is_refused_to_its_author():
    with pytest.raises(TypeError, match="type set"):
        check(HONEST, "f", [((1,), {2})])
    with pytest.raises(TypeError, match="type object"):
        check(HONEST, "f", [((object(),), 2)])
    with pytest.raises(ValueError, match="seconds"):
        check(HONEST, "f", HONEST_TESTS, seconds=0)
    assert check(HONEST, "f", []) == []


def test_big_output_and_big_values():
    """I88: what is printed is thrown away; answers have a limit, and what is said of a long value is short."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert passed("def f():\n    print('x' * 50_000_000)\n    return 1", [((), 1)]) == [True]
    (verdict,) = check("def f(): return 'x' * 5_000_000", "f", [((), 1)])
    assert verdict.said == "answers of more than 4,000,000 bytes"
    long = [(("a" * 90_000,), 1), (([0] * 999,), 1), ((10**5000,), 1)]
    assert all(0 < len(text) < 600 for text in said("def f(x): return x", long))
    assert len(said("def f(): raise ValueError('x' * 10**6)", [((), 1)])[0]) < 1100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024 * (1 if LINUX else 1024)


def test_the_limit_is_for_all_tests_together_and_keeps_what_was_answered_before():
    source = "import time\ndef f(n):\n    time.sleep(n)\n    return n\n"
    start = time.monotonic()
    verdicts = check(source, "f", [((0.0,), 0.0), ((0.2,), 0.2), ((0.2,), 0.2), ((0.2,), 0.2)], 0.5)
    assert verdicts[0].passed and verdicts[3] == Verdict(False, "time limit of 0.5 s") and 0.5 <= time.monotonic() - start < 1.5


def test_windows_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(sandbox, "os", types.SimpleNamespace(name="nt"))
    with pytest.raises(RuntimeError, match="^sandbox.py needs Linux or macOS[^\n]*$"):
        check(HONEST, "f", HONEST_TESTS)


# -- the helper ------------------------------------------------------------------------------------------


def test_a_helper_that_was_killed_is_replaced():
    check(HONEST, "f", HONEST_TESTS)
    old = sandbox._helper.process
    old.kill()
    old.wait()  # a signal takes its time: until then the helper may still serve
    assert passed(HONEST, HONEST_TESTS) == [True] * 3 and sandbox._helper.process is not old
    assert nothing_is_left()


def test_sixty_checks_leave_no_descriptor_and_no_process(walled):
    """I86: here and in the helper."""
    def count():
        return sorted(len(os.listdir(f"/proc/{pid}/fd")) for pid in ["self", *processes()])

    check(HONEST, "f", HONEST_TESTS)
    assert nothing_is_left()
    time.sleep(0.1)  # the waiting candidate closes what it inherited
    before = count()
    for _ in range(60):
        assert passed(HONEST, HONEST_TESTS) == [True] * 3
    assert nothing_is_left()
    time.sleep(0.1)
    assert count() == before


def test_thirty_sleepers_leave_no_zombie():
    """I86."""
    for _ in range(30):
        assert passed("import time\ndef f(n): time.sleep(9)", HONEST_TESTS[:1], seconds=0.03) == [False]
    assert nothing_is_left()


def test_works_from_threads_and_in_a_fork():
    """L105, L108: no alarm, no fork of this process; a fork of it gets a helper of its own."""
    results = []
    threads = [threading.Thread(target=lambda: results.append(passed(HONEST, HONEST_TESTS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[True] * 3] * 4
    before = sandbox._helper.process.pid
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(before,))
        child.start()
    child.join(20)
    assert child.exitcode == 0 and passed(HONEST, HONEST_TESTS) == [True] * 3 and sandbox._helper.process.pid == before


def _in_a_fork(before):
    assert passed(HONEST, HONEST_TESTS) == [True] * 3 and sandbox._helper.process.pid != before
    sandbox._close()


def test_the_helper_ends_with_its_parent():
    code = "import os, sandbox; sandbox.check('def f(): return 1', 'f', [((), 1)]); "
    code += "print(sandbox._helper.process.pid, flush=True); os.kill(os.getpid(), 9)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=os.path.dirname(sandbox.__file__))
    deadline = time.monotonic() + 2
    while os.path.exists(f"/proc/{run.stdout.strip()}/cmdline") and time.monotonic() < deadline:
        if Path(f"/proc/{run.stdout.strip()}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break  # dead; whoever is its parent now has not looked yet
        time.sleep(0.01)
    assert run.stdout and time.monotonic() < deadline


def test_a_huge_parent_does_not_eat_the_memory_limit(bare):
    """I96: the limit is that of a small fresh process, not of a fork of the trainer."""
    import mmap

    with mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)):
        assert passed("import json, re, math\ndef f(n): return len([0] * 10**6)", [((1,), 10**6)]) == [True]


def test_a_limit_that_the_system_refuses_is_named(monkeypatch):
    """L109: macOS refuses RLIMIT_AS."""

    def refuse(*_):
        raise ValueError("not here")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert sandbox._limit(AS=1) == ["RLIMIT_AS"]


def test_bare_warns_once_and_works(monkeypatch):
    sandbox._close()
    monkeypatch.setattr(sandbox, "_modes", ("bare",))
    with pytest.warns(RuntimeWarning, match="no network") as caught:
        assert passed(HONEST, HONEST_TESTS) == passed(HONEST, HONEST_TESTS) == [True] * 3
    assert len(caught) == 1
    sandbox._close()


def test_expected_values_never_leave_this_process(monkeypatch):
    """I91: what is sent is source and arguments."""
    sent, real = [], sandbox._converse
    monkeypatch.setattr(sandbox, "_converse", lambda c, request, *rest: sent.append(request) or real(c, request, *rest))
    check(HONEST, "f", SECRETS)
    assert len(sent) == 1 and b"answer-" not in sent[0] and b"0x3" in sent[0]


def test_environment_and_folder_are_empty(monkeypatch, tmp_path):
    """I95: no secret of ours in the environment; an empty folder, which is gone afterwards."""
    monkeypatch.setenv("SECRET_KEY", "abc")
    source = """
        import os, sys
        def f(n):
            before = os.listdir()
            open('x', 'w').write('y')
            return [dict(os.environ), before, os.listdir(), sys.argv]
    """
    assert passed(source, [((1,), [{}, [], ["x"], [""]])]) == [True]
    assert said("import os\ndef f(n): return os.listdir()", [((1,), [])]) == [""], "the last program's file is still there"


def test_forged_answers_are_values_or_malformed():
    """I84: what does not parse as the tagged form of plain data is a failure, never an exception here."""
    forged = [
        b"", b"[", b"1", b"null", b"{}", b"[]", b'["value"]', b'["passed", true]', b'["value", 12]', b'["value", {"int": 1}]',
        b'["value", ["int", 12]]', b'["value", ["int", "xyz"]]', b'["value", ["float", "nan"]]', b'["value", ["dict", "a"]]',
        b'["value", ["set", 1]]', b'["value", [[], []]]', b'["value", ["float", "0x1p99999"]]', b'["value", NaN]', b"\xff\xfe",
        b"[" * 400_000, b'["value", ' + b'["list", ' * 5000 + b"]" * 5001, b"9" * 5000, b'["error", 5]', b'["error", "\\ud800"]',
    ]  # fmt: skip
    for wanted in (12, 1.5, {"a": 1}, [1], None, "x"):
        for line in forged:
            verdict = sandbox._judge("f(3)", line, sandbox.encode(wanted), wanted, "the end")
            assert not verdict.passed and 0 < len(verdict.said.encode()) < 1100, line[:40]


def test_comparing_is_not_slowed_by_colliding_keys():
    """A dict of ints with one hash would cost the parent a minute if it were built."""
    keys = ", ".join(f'["int", "{hex(i * (2**61 - 1))}"], null' for i in range(25_000))
    start = time.monotonic()
    line = f'["value", ["dict", {keys}]]'.encode()
    assert not sandbox._judge("f()", line, sandbox.encode({i: None for i in range(25_000)}), 1, "").passed
    assert time.monotonic() - start < 2


# -- hostile programs ------------------------------------------------------------------------------------

Hostile = namedtuple("Hostile", "name story source seconds walls", defaults=(2.0, False))
CHANNEL = "import os, socket\ns = socket.socket(fileno=3)\n"
HUNT = "import os, sys, gc\nkey = 'ans' + 'wer-'\n"
HOSTILE = [
    Hostile("exit at import", "I84: status 0 before any test", "import sys\nsys.exit(0)"),
    Hostile("os._exit", "I84: status 0 inside the function", "import os\ndef f(n): os._exit(0)"),
    Hostile("atexit", "I84: an exit hook that leaves with 0", dedent("""
        import atexit, os
        atexit.register(os._exit, 0)
        def f(n): raise SystemExit(0)
    """)),
    Hostile("raise SystemExit", "I84, I89: leaves by exception", "def f(n): raise SystemExit"),
    Hostile("exit()", "I89: the interactive way out", "def f(n): exit()"),
    Hostile("KeyboardInterrupt", "I89: passes `except Exception`", "def f(n): raise KeyboardInterrupt"),
    Hostile("own BaseException", "an exception whose text raises", dedent("""
        class E(BaseException):
            def __str__(self): raise self
        def f(n): raise E()
    """)),
    Hostile("os.abort", "I89: dies by signal", "import os\ndef f(n): os.abort()"),
    Hostile("empty file", "I84: nothing is defined, nothing fails", ""),
    Hostile("syntax error", "I93: collection fails, results are absent", "def f(n:"),
    Hostile("deleted entry", "I93: the entry function is gone", "def f(n): return n\ndel f"),
    Hostile("crash at the second", "I93: absent results are failures", dedent("""
        import os
        def f(n): return os._exit(0) if n == 5 else 1
    """)),
    Hostile("endless loop", "I90: burns the CPU", "def f(n):\n    while True: pass", 0.5),
    Hostile("loop at import", "never gets to the function", "while True: pass", 0.5),
    Hostile("signals ignored", "SIGTERM, SIGALRM, SIGINT, SIGXCPU do nothing", dedent("""
        import signal
        for s in (1, 2, 14, 15, 24): signal.signal(s, lambda *a: None)
        def f(n):
            while True: pass
    """), 0.5),
    Hostile("swallow everything", "catches whatever is thrown at it", dedent("""
        def f(n):
            while True:
                try: f(n)
                except BaseException: pass
    """), 0.5),
    Hostile("deep recursion", "I89: no limit, until memory ends", dedent("""
        import sys
        sys.setrecursionlimit(10**9)
        def f(n): return f(n + 1)
    """), 1.0),
    Hostile("C stack overflow", "repr of a deep list with the limit off", dedent("""
        import sys
        sys.setrecursionlimit(10**9)
        def f(n):
            x = []
            for _ in range(10**6): x = [x]
            return repr(x)
    """), 1.0),
    Hostile("segmentation fault", "ctypes reads address 0", "import ctypes\ndef f(n): return ctypes.string_at(0)"),
    Hostile("memory bomb", "more than the limit, at once and slowly", dedent("""
        def f(n):
            x = []
            while len(x) < 4000: x.append(bytearray(10**6))
            return 1
    """), 1.0),
    Hostile("fork bomb", "I92: at most 300 children", dedent("""
        import os
        def f(n):
            for i in range(300):
                if os.fork() == 0:
                    import time; time.sleep(5); os._exit(0)
    """), 1.0),
    Hostile("thread bomb", "300 threads that outlive the call", dedent("""
        import threading, time
        def f(n):
            for _ in range(300): threading.Thread(target=time.sleep, args=(5,)).start()
            return 1
    """), 1.0),
    Hostile("daemon", "I87: double fork, own session, ignores signals", dedent("""
        import os, signal, time
        def f(n):
            try:
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        signal.signal(15, signal.SIG_IGN); time.sleep(6)
                    os._exit(0)
            except OSError: pass
            return 1
    """), 1.0),
    Hostile("sleeper with the pipe", "I87: a child holds the channel open", dedent(f"""
        import subprocess
        def f(n): subprocess.Popen(['/bin/sh', '-c', 'sleep 6 # {MARK}'], close_fds=False)
    """), 1.0),
    Hostile("setsid escape", "leaves its process group, then hangs", dedent("""
        import os, time
        def f(n):
            try: os.setsid()
            except OSError: pass
            try: os.setpgid(0, 0)
            except OSError: pass
            time.sleep(6)
    """), 0.5),
    Hostile("output flood", "I88: prints without end", dedent("""
        import sys
        def f(n):
            while True: print('x' * 10**6); sys.stderr.write('y' * 10**6)
    """), 0.5),
    Hostile("answer flood", "bytes without end into the channel", CHANNEL + dedent("""
        def f(n):
            while True: s.sendall(b'x' * 10**6)
    """), 1.0),
    Hostile("line flood", "a million empty answers", CHANNEL + "def f(n):\n    s.sendall(b'\\n' * 10**6)"),
    Hostile("slow drip", "one byte at a time keeps the reader awake", CHANNEL + dedent("""
        import time
        def f(n):
            while True: s.sendall(b'x'); time.sleep(.01)
    """), 0.5),
    Hostile("forged answers", "writes results of its own", CHANNEL + dedent("""
        s.sendall(b'["value", true]\
        ["passed", ""]\
        ' * 3)
        def f(n): return True
    """)),
    Hostile("forged status", "writes to every descriptor", dedent("""
        import os
        def f(n):
            for d in range(32):
                try: os.write(d, b'{"passed": true, "said": ""}\
        [true]\
        ')
                except OSError: pass
    """)),
    Hostile("closed descriptors", "closes everything, then goes on", dedent("""
        import os, time
        def f(n):
            os.closerange(0, 64); time.sleep(1); return 1
    """), 0.5),
    Hostile("equal to all", "I85: __eq__, __class__, __getattribute__ lie", dedent("""
        class A:
            __class__ = str
            def __eq__(s, o): return True
            def __getattribute__(s, k): return lambda *a: True
            __sub__ = __abs__ = __len__ = __hash__ = lambda *a: 0
        def f(n): return A() if n == 3 else [A()]
    """)),
    Hostile("equal str", "I85: a subclass of str, also in a dict", dedent("""
        class S(str):
            def __eq__(s, o): return True
            def __ne__(s, o): return False
            __hash__ = str.__hash__
        def f(n): return S('x') if n == 3 else {'k': S('y')}
    """)),
    Hostile("lying metaclass", "type names and instance checks lie", dedent("""
        class M(type):
            def __instancecheck__(c, o): return True
            def __eq__(c, o): return True
            __hash__ = type.__hash__
            __name__ = property(lambda c: 'str')
        class A(metaclass=M): pass
        def f(n): return A()
    """)),
    Hostile("patched builtins", "I94: type, len, isinstance, str, sum, sorted, hex", dedent("""
        import builtins
        for k in ('type', 'len', 'isinstance', 'sum', 'sorted', 'hex', 'callable', 'repr'):
            setattr(builtins, k, lambda *a, **k: True)
        def f(n): return n
    """)),
    Hostile("patched json", "I94: every dump is a pass", dedent("""
        import json, random
        random.seed = lambda *a: 1 / 0
        json.dumps = lambda *a, **k: '["value", true]'
        json.loads = lambda *a, **k: ['value', True]
        def f(n): return 1
    """)),
    Hostile("patched frames", "rewrites the runner's globals", dedent("""
        import sys, os
        frame = sys._getframe()
        while frame:
            g = frame.f_globals
            if 'same' in g:
                g.update(same=lambda *a: True, encode=lambda *a: True, _judge=lambda *a: True, _call=lambda *a: ['passed', True])
            frame = frame.f_back
        def f(n): return 1
    """)),
    Hostile("emptied sys.modules", "takes the interpreter apart", dedent("""
        import sys
        for k in list(sys.modules): sys.modules[k] = None
        def f(n): return 1
    """)),
    Hostile("os._exit patched", "the child is to walk on into the helper's loop", dedent("""
        import os, sys
        os._exit = sys.exit = lambda *a: None
        def f(n): raise SystemExit
    """)),
    Hostile("frames", "I91: looks for expected values up the stack", HUNT + dedent("""
        def f(n):
            frame = sys._getframe()
            while frame:
                for v in [*frame.f_locals.values(), *frame.f_globals.values()]:
                    if key in repr(v) and v != key: return v
                frame = frame.f_back
    """)),
    Hostile("gc", "I91: looks for them in every object", HUNT + dedent("""
        def f(n):
            for o in gc.get_objects():
                for v in gc.get_referents(o):
                    if type(v) is str and v.startswith(key) and len(v) > 7: return v
    """)),
    Hostile("memory of the parent", "I91: /proc/PPID/mem, environ, cmdline, fd", HUNT + dedent("""
        def f(n):
            for p in [os.getppid(), 1, 'self', *range(2, 40000)]:
                for name in ('environ', 'cmdline'):
                    try: text = open(f'/proc/{p}/{name}').read()
                    except OSError: continue
                    if key in text: return text
    """), 1.0),
    Hostile("own memory", "I91: scans its heap", HUNT + dedent("""
        def f(n):
            for line in open('/proc/self/maps'):
                a, b = (int(x, 16) for x in line.split()[0].split('-'))
                with open('/proc/self/mem', 'rb') as m:
                    m.seek(a); data = m.read(b - a); i = data.find(key.encode() + str(n).encode())
                    if i >= 0: return data[i:i + 27].decode('latin1')
    """), 1.0),
    Hostile("project's files", "I91: imports the tasks and their answers", dedent(f"""
        import sys
        sys.path.insert(0, {os.path.dirname(os.path.abspath(sandbox.__file__))!r})
        import envs
        def f(n): return 1
    """), 2.0, True),
    Hostile("walk", "I91: reads every file it may", HUNT + dedent("""
        def f(n):
            for d, _, names in os.walk('/'):
                for name in names:
                    if not name.startswith('test_'): continue
                    text = open(os.path.join(d, name), errors='replace').read()
                    if key in text: return text
    """), 1.0),
    Hostile("planted files", "writes to cwd, /tmp, home and up", dedent(f"""
        import os
        def f(n):
            for d in ('.', '..', '/', '/tmp', '/var/tmp', '/dev/shm', '/box', {os.getcwd()!r}, {os.path.expanduser('~')!r}):
                try:
                    open(d + '/{MARK}', 'w').write('x'); os.makedirs(d + '/{MARK}-d/' + 'a/' * 50)
                except OSError: pass
            return 1
    """), 1.0, True),
    Hostile("big file", "fills the disk", dedent(f"""
        import os
        def f(n):
            with open('{MARK}', 'wb') as g:
                for _ in range(10**4): g.write(b'x' * 10**6)
            return 1
    """), 1.0),
    Hostile("many files", "fills the folder, deep and wide", dedent(f"""
        import os
        def f(n):
            for i in range(2000): os.mkdir('{MARK}'); os.chdir('{MARK}')
    """), 1.0),
    Hostile("graph to the importer", "I92: from a literal to os", dedent("""
        def f(n):
            for c in ().__class__.__base__.__subclasses__():
                if c.__name__ == '_wrap_close': return c.__init__.__globals__['system']('echo answer')
    """)),
    Hostile("kill parent and group", "SIGKILL to whoever is near", dedent("""
        import os, signal
        def f(n):
            for p in (0, os.getppid(), -os.getpgrp(), -1):
                try: os.kill(p or os.getppid(), 9)
                except OSError: pass
            return 1
    """), 1.0, True),
    Hostile("kill all numbers", "SIGKILL to every process id", dedent("""
        import os
        def f(n):
            for p in range(2, 40000):
                try: os.kill(p, 9)
                except OSError: pass
            os.kill(os.getpid(), 9)
    """), 1.0, True),
    Hostile("ptrace", "attaches to the helper", dedent("""
        import ctypes, os
        def f(n): return ctypes.CDLL(None).ptrace(16, os.getppid() or 1, 0, 0)
    """), 1.0, True),
    Hostile("huge int", "ten million digits", "def f(n): return 1 << 33_000_000", 1.0),
    Hostile("huge numbers in text", "an int that cannot be printed", "def f(n): return 10**5000"),
    Hostile("surrogates", "a string that no codec takes, and an error with one", dedent("""
        def f(n):
            if n == 3: return '\\ud800' * 9
            raise ValueError('\\udcff\\x00')
    """)),
    Hostile("surrogate source", "a program that no codec takes", "x = '\ud800'\ndef f(n): return x"),
    Hostile("NaN", "equal to nothing, and infinity", "def f(n): return float('nan') if n == 3 else float('inf')"),
    Hostile("list in itself", "endless when walked", "def f(n):\n    x = []; x.append(x); return x if n == 3 else {'k': x}"),
    Hostile("doubling list", "2**60 leaves in sixty lists", dedent("""
        def f(n):
            x = []
            for _ in range(60): x = [x, x]
            return x
    """), 0.5),
    Hostile("deep list", "a million levels", "def f(n):\n    x = []\n    for _ in range(10**6): x = [x]\n    return x"),
    Hostile("__del__", "runs code when it is thrown away", dedent("""
        import os
        class D:
            def __del__(self):
                while True: pass
        def f(n):
            d = D(); return 1
    """), 0.5),
    Hostile("thread that forges", "goes on writing between the tests", CHANNEL + dedent("""
        import sys
        sys.setswitchinterval(1e-6)
        import threading
        def run():
            while True: s.sendall(b'["value", true]\
        ')
        try: threading.Thread(target=run, daemon=True).start()
        except RuntimeError: pass
        def f(n): return 1
    """), 1.0),
    Hostile("trace function", "hooks every line of the runner", dedent("""
        import sys
        def hook(frame, event, arg):
            frame.f_locals.clear()
            return hook
        sys.settrace(hook)
        def f(n): return 1
    """)),
    Hostile("10 MB source", "refused before it costs anything", "x = '" + "a" * 10_000_000 + "'\ndef f(n): return x"),
    Hostile("nested source", "parser's stack", "x = " + "(" * 5000 + ")" * 5000),
    Hostile("null byte", "no program at all", "def f(n): return 1\0"),
]  # fmt: skip


def attack(hostile):
    start = time.monotonic()
    verdicts = check(hostile.source, "f", SECRETS, hostile.seconds)
    took = time.monotonic() - start
    assert [v.passed for v in verdicts] == [False, False] and all(v.said for v in verdicts)
    assert took < hostile.seconds + 1
    assert nothing_is_left()
    assert passed(HONEST, HONEST_TESTS) == [True] * 3


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda h: h.name.replace(" ", "-"))
def test_hostile_program(hostile, request):
    """I84-I95: scores nothing, keeps its limit, leaves nothing, and the next honest program passes."""
    if hostile.walls:
        request.getfixturevalue("walled")
    attack(hostile)


BARE = ("os._exit", "endless loop", "memory bomb", "fork bomb", "daemon", "forged answers", "closed descriptors", "equal to all",
        "many files", "frames", "segmentation fault")  # fmt: skip


@pytest.mark.skipif(not LINUX, reason="reads /proc; on macOS every test is a bare one")
def test_hostile_programs_without_walls(bare):
    """What does not need namespaces holds without them: limits, verdicts, processes, the working directory."""
    boxes = set(Path("/tmp").glob("tmp*"))
    for hostile in HOSTILE:
        if hostile.name in BARE:
            attack(hostile)
    sandbox._close()
    if os.getuid() == 0:  # then they can be told apart by their owner
        mine = [p for p in set(Path("/tmp").glob("tmp*")) - boxes if p.exists() and 59_000 <= p.stat().st_uid < 60_000]
        deadline = time.monotonic() + 15
        while any(p.exists() for p in mine) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(p.exists() for p in mine)


def test_no_network(walled):
    """I92: a server of this machine cannot be reached, although it can from here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        source = "import socket\ndef f(p):\n    socket.create_connection(('127.0.0.1', p), 1)\n    return 1\n"
        (text,) = said(source, [((port,), 1)])
    assert "OSError" in text or "Error" in text and "refused" not in text


def test_shared_memory_does_not_survive(walled):
    """System V segments outlive their process; here they end with the check."""
    source = "import ctypes\ndef f(flag): return ctypes.CDLL(None).shmget(77, 4096, flag) >= 0\n"
    assert passed(source, [((0o1666,), True)]) == [True]
    assert passed(source, [((0,), False)]) == [True]


def test_the_trainers_random_state_is_untouched():
    """I94."""
    state = random.getstate()
    check("import random\nrandom.seed(1)\ndef f(n): return random.random()", "f", HONEST_TESTS)
    assert random.getstate() == state
