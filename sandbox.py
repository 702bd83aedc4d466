"""Runs untrusted Python for the coding world: one call, `check`, gives one verdict per test (SGE C.1: 2 s, all tests or nothing).

Three parties, and only the first knows what is right:
  parent     this process.  Holds the expected values, compares, never runs candidate code.
  helper     a clean interpreter (-I -S, empty environment), started once.  It forks a child per check, kills and
             reaps it, and never runs candidate code nor reads a byte of it.
  candidate  the child.  It gets the source and the arguments over a socket and writes values back, as tagged JSON of
             exact builtin types (never pickle).  It may forge answers: they are still only values, which have to equal
             expected ones it has never seen.  Missing, malformed or too long = failed.

Covered, on every system:
  1. wall-clock limit, for all tests of a check together; CPU, memory, file-size, descriptor and process limits.  A candidate
     may start no process and no thread; run by root, it is moved to a user id of its own, since root has no process limit.
  2. no environment, no input, an empty working directory that is removed; what it prints is thrown away.
  3. nothing survives a check: the child is killed with its session; the next check is a new fork of the clean helper.
Covered on Linux, where namespaces are allowed ("walled"; otherwise `check` warns once, "bare"):
  4. no network; no files but Python's library and system libraries, read-only: neither the project nor /tmp, /proc, /dev.
  5. no other process can be seen, signalled or traced; shared-memory segments end with the check.
Not covered - this is not a true sandbox, keep nothing on the machine that it would be grave to lose:
  1. faults of the kernel or of Python; sockets outside network namespaces (AF_VSOCK); memory taken as System V segments.
  2. bare (macOS, some containers): network, files and processes of the user are open to the candidate, kill(-1) included.
     Root in bare mode needs a Python that other users may read.  macOS also has no memory limit.
  3. what a candidate may learn of the arguments of its other tests; timing; the order of sets of strings from run to run.

Try it:  python sandbox.py      prints the cost of a check of ten tests against that of a fresh interpreter
"""

import atexit
import builtins
import ctypes
import gc
import json
import linecache
import math
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 256 << 20  # bytes of address space of a candidate
FILE_SIZE = 1 << 20  # bytes of any one file
DESCRIPTORS = 32
SOURCE_SIZE = 1_000_000  # characters of a program
ANSWER_SIZE = 4_000_000  # bytes, all answers of a check together
NOTE = 200  # bytes of each text from the helper to the parent
DEPTH = 100  # levels of nesting in a value
TOLERANCE = 1e-6  # relative and absolute, of floats: 0.1 + 0.2 is right where 0.3 is expected
FILE_NAME = "<solution>"  # what tracebacks call the program


@dataclass(frozen=True)
class Verdict:
    """Of one test.  said: "" if passed, else a short text such as `f([3, 1]) returned 4, expected -4`."""

    passed: bool
    said: str


# ------------------------------------------------------------------------------------------------------
# values as tagged JSON
# ------------------------------------------------------------------------------------------------------


def encode(value, depth: int = 0):
    """A JSON-able tree of plain data; TypeError for anything else, subclasses of builtin types included.

    Numbers are written in base 16: floats stay exact, NaN and infinity have a form, and ints of any length
    are read without Python's limit of 4300 decimal digits.

    >>> encode([1, (2.0, "a"), {True: None}])
    ['list', ['int', '0x1'], ['tuple', ['float', '0x1.0000000000000p+1'], 'a'], ['dict', True, None]]
    """
    kind = type(value)  # compared by "is": a metaclass of the candidate's may claim to equal `str`
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return ["int", hex(value)]
    if kind is float:
        return ["float", value.hex()]
    if not (kind is list or kind is tuple or kind is dict):
        raise TypeError(f"a value of type {kind.__name__}, which is not plain data")
    if depth == DEPTH:
        raise TypeError(f"a value nested more than {DEPTH} levels deep")
    items = [item for pair in value.items() for item in pair] if kind is dict else value
    return [kind.__name__, *[encode(item, depth + 1) for item in items]]


def decode(tree, depth: int = 0):
    """The value of a tree; ValueError, TypeError or OverflowError if there is none.

    >>> decode(encode([1, (2.0, "a"), {True: None}]))
    [1, (2.0, 'a'), {True: None}]
    """
    if type(tree) in (types.NoneType, bool, str):
        return tree
    if type(tree) is not list or not tree or depth > DEPTH:
        raise ValueError("not a tree of plain data")
    kind, *items = tree
    if kind in ("int", "float"):
        (digits,) = items
        return int(digits, 16) if kind == "int" else float.fromhex(digits)
    items = [decode(item, depth + 1) for item in items]
    if kind == "dict":
        return dict(zip(items[::2], items[1::2], strict=True))
    if kind not in ("list", "tuple"):
        raise ValueError("not a tree of plain data")
    return items if kind == "list" else tuple(items)


def same(got, want) -> bool:
    """Whether two encoded values are equal, types included: True, 1 and 1.0 are three values; floats by TOLERANCE.

    Trees are compared, not decoded values: `got` comes from the candidate, and a dict of chosen ints whose
    hashes collide would keep the parent busy for minutes.  NaN equals NaN, as a test may expect it.
    """
    if type(got) is not type(want) or type(want) is not list:
        return type(got) is type(want) and got == want
    if len(got) != len(want) or got[0] != want[0]:
        return False
    if want[0] == "float":
        x, y = float.fromhex(got[1]), float.fromhex(want[1])
        return math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (x != x and y != y)
    if want[0] != "dict":
        return all(same(a, b) for a, b in zip(got[1:], want[1:], strict=True))
    mine, theirs = ({json.dumps(k): v for k, v in zip(t[1::2], t[2::2], strict=True)} for t in (got, want))
    return mine.keys() == theirs.keys() and all(same(mine[k], theirs[k]) for k in theirs)


# ------------------------------------------------------------------------------------------------------
# parent: ask, compare, tell
# ------------------------------------------------------------------------------------------------------


def check(source: str, entry: str, tests: Sequence[tuple[tuple, object]], seconds: float = 2.0) -> list[Verdict]:
    """Run the program, call entry(*args) for each test (args, expected), and compare; one verdict per test, in order.

    seconds: wall-clock limit for all tests together.  Arguments are decoded anew for each call, so that a
    program which changes its input harms no other test.  Works from any thread, one check at a time.
    TypeError: a test holds what is not plain data.  RuntimeError: no sandbox on this system.
    """
    if os.name != "posix":
        raise RuntimeError("sandbox.py needs Linux or macOS: the coding world cannot run on this system")
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0, not {seconds}")
    arguments = [json.dumps(encode(tuple(args))) for args, _ in tests]
    wanted = [encode(expected) for _, expected in tests]
    if len(source) > SOURCE_SIZE:
        return [Verdict(False, f"the program is longer than {SOURCE_SIZE:,} characters")] * len(tests)
    if not tests:
        return []
    request = json.dumps({"source": source, "entry": entry, "arguments": arguments, "seconds": seconds})
    lines, end = _ask(request.encode() + b"\n", len(tests), seconds)
    lines += [b""] * (len(tests) - len(lines))
    return [
        _judge(f"{entry}({', '.join(_show(a) for a in args)})", line, tree, expected, end)
        for (args, expected), tree, line in zip(tests, wanted, lines, strict=True)
    ]


def _judge(call: str, line: bytes, tree, expected, end: str) -> Verdict:
    """The verdict on one line of the candidate's answer; b"" stands for a line that never came, for the reason `end`."""
    if not line:
        return Verdict(False, end)
    try:
        kind, answer = json.loads(line)
        if kind == "value" and same(answer, tree):
            return Verdict(True, "")
        if kind == "error" and type(answer) is str:
            return Verdict(False, f"{call}: {answer[-1000:]}".encode("utf-8", "replace").decode())
        shown = _show(decode(answer)) if len(line) < 10_000 else "a value too long to show"
        return Verdict(False, f"{call} returned {shown}, expected {_show(expected)}")
    except (ValueError, TypeError, OverflowError, RecursionError):  # only forged lines come here
        return Verdict(False, f"{call} gave a malformed answer")


def _show(value) -> str:
    """repr, at most 200 characters of it."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4300 digits
        return "a number too long to show"
    return text if len(text) <= 200 else text[:150] + " ... " + text[-45:]


def _ask(request: bytes, n: int, seconds: float) -> tuple[list[bytes], str]:
    """At most n lines of answer, and why there are no more.  A helper that died is replaced, once per check."""
    global _helper
    with _lock:
        for _ in range(2):
            if _helper is None or _helper.process.poll() is not None:
                _close()
                _helper = _start()
            lines, end = _helper.ask(request, n, seconds)
            if end:
                break
            _close()
    return lines, end or "the sandbox's helper died"


class _Helper:
    """The parent's end of one helper process.  ready: what it said at its start, "" if it did not come up."""

    def __init__(self, mode: str):
        self.control, theirs = socket.socketpair()
        self.control.settimeout(20)
        with theirs, open(os.devnull, "r+b") as null:
            command = [sys.executable, "-I", "-S", os.path.abspath(__file__), "--serve", mode]
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=null, stderr=null, env={}, cwd="/", start_new_session=True
            )
        self.ready = self.hear()

    def hear(self) -> str:
        """A text of fixed length: a longer read would swallow the descriptor that follows it."""
        return self.control.recv(NOTE, socket.MSG_WAITALL).decode().strip()

    def ask(self, request: bytes, n: int, seconds: float) -> tuple[list[bytes], str]:
        """As `_ask`; the reason is "" if the helper is gone."""
        try:
            _, descriptors, *_ = socket.recv_fds(self.control, 1, 1)
            if not descriptors:
                return [], ""
            with socket.socket(fileno=descriptors[0]) as channel:
                lines, late = _converse(channel, request, n, seconds)
            self.control.sendall(b"k")
            status = self.hear()
        except OSError:
            return [], ""
        return lines, late or (status and f"the program ended before it answered ({status})")

    def close(self) -> None:
        self.control.close()  # tells the helper to end its candidate and itself
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _converse(channel: socket.socket, request: bytes, n: int, seconds: float) -> tuple[list[bytes], str]:
    """Send the request, read n lines; ("time limit of 2 s" or the like) where a limit ended it, "" where the candidate did."""
    deadline, data, lines = time.monotonic() + seconds, bytearray(), 0
    reason = ""
    try:
        channel.settimeout(seconds)
        channel.sendall(request)
        wait = select.poll()  # for the end of a quick program rather than for each line: a wake-up costs as much as a test
        wait.register(channel, 0)
        wait.poll(min(20.0, 1e3 * seconds))
        while lines < n and not reason:
            channel.settimeout(max(deadline - time.monotonic(), 1e-3))
            chunk = channel.recv(1 << 16)
            data += chunk
            lines += chunk.count(b"\n")
            if not chunk:
                break
            if len(data) > ANSWER_SIZE:
                reason = f"answers of more than {ANSWER_SIZE:,} bytes"
            elif time.monotonic() > deadline:
                reason = f"time limit of {seconds:g} s"
    except TimeoutError:
        reason = f"time limit of {seconds:g} s"
    except ConnectionError:  # the candidate died before it had read everything
        pass
    return bytes(data).split(b"\n")[:-1][:n], reason  # what follows the last line end was cut off


_helper: _Helper | None = None
_lock = threading.Lock()
_modes = ("walled", "bare")


def _start() -> _Helper:
    """A helper behind the best walls that this system allows."""
    for mode in _modes:
        helper = _Helper(mode)
        if helper.ready.startswith("ready"):
            if missing := helper.ready[len("ready") :].strip():
                warnings.warn(f"sandbox.py: not covered on this system: {missing}", RuntimeWarning, stacklevel=4)
            return helper
        helper.close()
    raise RuntimeError(f"sandbox.py: the helper does not start: {helper.ready or 'no reason given'}")


def _close() -> None:
    global _helper
    if _helper is not None:
        _helper.close()
        _helper = None


def _forget() -> None:
    """In a fork of the parent: the helper belongs to the original, and the lock may be held by a thread that is not here."""
    global _helper, _lock
    if _helper is not None:
        _helper.control.close()
    _helper, _lock = None, threading.Lock()


# ------------------------------------------------------------------------------------------------------
# helper: fork, kill, reap
# ------------------------------------------------------------------------------------------------------

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000  # sched.h
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18  # sys/mount.h
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store", sys.base_prefix + "/lib", sys.base_prefix + "/lib64")
PRELOADED = "bisect collections copy decimal fractions functools heapq itertools math operator random re string typing"


def serve(mode: str) -> None:
    """The helper's life.  Control socket: a byte with a descriptor = check, one more = end it; answers with how it ended."""
    control = socket.socket(fileno=0)
    walled, user = mode == "walled", 59_000 + os.getpid() % 1000  # a user id per helper: its process count is its own
    try:
        for name in PRELOADED.split():
            __import__(name)
        own = _wall() if walled else None
        missing = _limit(AS=MEMORY, FSIZE=FILE_SIZE, NOFILE=DESCRIPTORS, CORE=0)
    except OSError as error:
        _say(control, f"{mode}: {error}")
        return
    missing += [] if walled else ["no network", "files and processes of this user kept apart"]
    sys.argv, sys.path[:] = [""], [p for p in sys.path if p != os.path.dirname(os.path.abspath(__file__))]
    os.environ.clear()
    globals().update({k: v for k, v in vars(builtins).items() if k[0] != "_"})  # a candidate may patch the originals
    gc.freeze()  # a child's garbage collector leaves these pages shared
    _say(control, "ready " + ", ".join(missing))
    while _one_check(control, own, user):
        pass


def _say(control: socket.socket, text: str) -> None:
    control.sendall(text.encode()[:NOTE].ljust(NOTE))


def _one_check(control: socket.socket, own: int | None, user: int) -> bool:
    """Fork a candidate, hand it to the parent, end it when told; False if the parent is gone.

    own: this process' PID namespace if walled.  The candidate is forked before the parent asks for it: then it is
    ready, all rights given up, and waits for its request.
    """
    channel, far = socket.socketpair()
    box = _make_box(own is not None, user)
    if own is not None:  # a PID namespace per check, whose first process is the candidate: nothing in it outlives that one
        _libc("setns", own, NEWPID)
        _libc("unshare", NEWPID | NEWIPC)
    pid = os.fork()
    if pid == 0:
        _become_candidate(channel.fileno(), box, user, own is not None)
    channel.close()
    told = _hand_over(control, far)
    for kill in (os.kill, os.killpg):  # killpg fails if the child did not come as far as setsid
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # PermissionError: macOS, of a session of zombies
            pass
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _remove_box(box, own is not None)
    if told:
        _say(control, f"exit status {code}" if code >= 0 else f"signal {-code}")
    return bool(told)


def _hand_over(control: socket.socket, far: socket.socket) -> bytes:
    """Give the parent its end of the channel and wait for its word; b"" if it is gone (reset: with the gift unopened)."""
    try:
        with far:
            socket.send_fds(control, [b"c"], [far.fileno()])
        return control.recv(1)
    except ConnectionError:
        return b""


def _make_box(walled: bool, user: int) -> str:
    """The candidate's working directory: empty and writable; walled, a memory disk of 1 MB and 64 files."""
    if walled:
        _mount("tmpfs", "/box", NOSUID | NODEV | NOEXEC, "size=1m,nr_inodes=64,mode=777")
        return "/box"
    box = tempfile.mkdtemp()
    if os.getuid() == 0:
        os.chown(box, user, user)
    return box


def _remove_box(box: str, walled: bool) -> None:
    if walled:
        _libc("umount2", b"/box", 2)  # 2 = detach
    else:  # not shutil.rmtree: folders can be nested deeper than it recurses; "&": thousands of folders take seconds
        os.spawnv(os.P_WAIT, "/bin/sh", ["sh", "-c", 'rm -rf "$0" &', box])


def _wall() -> int:
    """Move this process to a root folder of libraries only, without network; OSError where the system forbids it.

    Root may do this as it is; anyone else becomes root of a new user namespace first.  The new root is
    mounted over /proc, a folder that every Linux has, since nothing has to be removed from there afterwards.
    What goes on is a child, in a PID namespace of its own: only to that one may anyone but root return (`setns`).
    """
    ids = {"uid": os.getuid(), "gid": os.getgid()}
    _libc("unshare", NEWNS | NEWNET | NEWIPC | NEWPID | (NEWUSER if ids["uid"] else 0))
    if ids["uid"]:
        maps = {f"{name}_map": f"{number} {number} 1" for name, number in ids.items()}
        for name, text in {"setgroups": "deny", **maps}.items():
            with open(f"/proc/self/{name}", "w", encoding="ascii") as f:
                f.write(text)
    if pid := os.fork():
        os.close(0)  # the control socket is the child's alone
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
    _die_with_parent()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    _mount(None, "/", REC | PRIVATE)  # nothing below is seen by the rest of the system
    _mount("tmpfs", "/proc", NOSUID | NODEV, "size=1m,mode=755")
    for path in sorted({path for path in LIBRARIES if os.path.isdir(path)}):
        os.makedirs("/proc" + path)
        _mount(path, "/proc" + path, BIND | REC)
        kept = os.statvfs("/proc" + path).f_flag & NOEXEC  # a user namespace may not loosen it
        _mount(None, "/proc" + path, REMOUNT | BIND | RDONLY | NOSUID | NODEV | kept)
    os.mkdir("/proc/box")
    _mount(None, "/proc", REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chroot("/proc")
    os.chdir("/")
    _libc("unshare", NEWPID)  # fails here, not at the first check, where PID namespaces are forbidden
    return own


def _mount(what: str | None, where: str, flags: int, options: str = "") -> None:
    kind = what if what == "tmpfs" else None
    what, where, kind = (text and text.encode() for text in (what, where, kind))
    _libc("mount", what, where, kind, ctypes.c_ulong(flags), options.encode())


def _libc(name: str, *args) -> None:
    """Call a function of the C library; OSError if it says -1."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _die_with_parent() -> None:
    _libc("prctl", 1, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))


def _limit(**limits: int) -> list[str]:
    """Set resource limits for good; the names of those that this system refuses (macOS has no RLIMIT_AS to set)."""
    import resource  # not on Windows, where this file is still imported

    missing = []
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        except (ValueError, OSError):
            missing.append("RLIMIT_" + name)
    return missing


# ------------------------------------------------------------------------------------------------------
# candidate: give up all rights, run, answer
# ------------------------------------------------------------------------------------------------------


def _become_candidate(channel: int, box: str, user: int, walled: bool, exit=os._exit) -> None:
    """The child's life; never returns.  Descriptors: 0-2 the null device, 3 the channel."""
    status = 70  # of a child that fails before its end: an interpreter that the candidate damaged, or a fault here
    try:
        os.dup2(1, 0)
        os.dup2(channel, 3)
        os.closerange(4, DESCRIPTORS)
        os.setsid()
        os.chdir(box)
        _drop_rights(user, walled)
        line = socket.socket(fileno=3)  # held to the end: the parent, which waits for its closing, wakes when all is over
        _answer(line)
        status = 0
    finally:
        exit(status)


def _drop_rights(user: int, walled: bool) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    if walled:  # a user namespace gave all capabilities in it, and only this takes them away
        _libc("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    if sys.platform == "linux":
        _libc("prctl", 38, *map(ctypes.c_ulong, (1, 0, 0, 0)))  # no new privileges
        _die_with_parent()
    _limit(NPROC=1)  # itself: any fork, and on Linux any thread, fails


def _answer(channel: socket.socket) -> None:
    """Read the request, then write a line per test: ["value", tree] or ["error", text]."""
    request = json.loads(channel.makefile("rb").readline())
    _limit(CPU=math.ceil(request["seconds"]) + 1)  # for the case that the parent is stopped
    send, dumps, loads = channel.sendall, json.dumps, json.loads  # kept: a candidate may patch the modules
    function, error = _load(request["source"], request["entry"])
    for arguments in request["arguments"]:
        answer = ["error", error] if error else _call(function, loads(arguments))
        send(dumps(answer).encode() + b"\n")


def _load(source: str, entry: str) -> tuple[object, str]:
    """The function named `entry` of the program, or None and what went wrong."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = sys.modules["__main__"] = module
    linecache.cache[FILE_NAME] = (len(source), None, source.splitlines(True), FILE_NAME)  # for tracebacks
    try:
        exec(compile(source, FILE_NAME, "exec", dont_inherit=True), vars(module))
        function = vars(module).get(entry)
        return function, "" if callable(function) else f"the program defines no function {entry}"
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        return None, _tell(error)


def _call(function, arguments) -> list:
    try:
        value = function(*decode(arguments))
    except BaseException as error:
        return ["error", _tell(error)]
    try:
        return ["value", encode(value)]
    except TypeError as error:
        return ["error", f"returned {error}"]


def _tell(error: BaseException) -> str:
    """The last lines of the traceback, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE_NAME:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace, limit=-3)).strip()[-1000:]


# ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Print the median cost of a warm check of ten tests, that of a fresh isolated interpreter, and their ratio."""
    source, tests = "def add(a, b):\n    return a + b\n", [((i, i), 2 * i) for i in range(10)]
    assert all(v.passed for v in check(source, "add", tests))  # starts the helper
    costs = {"check": [], "fresh": []}
    for _ in range(40):  # in turn, so that other load on the machine meets both
        start = time.perf_counter()
        check(source, "add", tests)
        middle = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
        costs["check"].append(middle - start)
        costs["fresh"].append(time.perf_counter() - middle)
    warm, fresh = (1e3 * statistics.median(costs[name]) for name in ("check", "fresh"))
    print(f"check of 10 tests, warm: {warm:.2f} ms    fresh interpreter: {fresh:.2f} ms    ratio: {warm / fresh:.2f}")


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1:2] == ["--serve"] else main()
elif os.name == "posix":
    atexit.register(_close)
    os.register_at_fork(after_in_child=_forget)
