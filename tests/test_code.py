"""The world `code`, besides what test_envs.py tests in every world: short tasks and their rule, the bank of problems, attempts
and what is said of them, the script."""

import functools
import itertools
import json
import os
import random
import re
from collections import Counter

import pytest

import envs
import envs as world
import oracles
import problems
import sandbox

play = functools.partial(oracles.play, "code")
TASKS = world.code_tasks()
ALL = [task for tasks in TASKS.values() for task in tasks]
SHORT = [task for task in ALL if task.family != "problem"]
BANK = [task for task in ALL if task.family == "problem"]


def episode(task, **how):
    """An episode of the script: [(strategy, action, observation), ...] and the reward."""
    return oracles.follow("code", task, world.CodeScript(task, random.Random(task.id), **how))


def answer(task):
    """A program that passes."""
    return oracles.code_plan(task)[0]


# -- tasks and splits ------------------------------------------------------------------------------------


def test_the_bank_is_large_enough_and_every_task_has_8_to_20_tests():
    bank = Counter((t.split, t.tier) for t in BANK)
    assert all(bank[split, tier] >= {"train": 14, "test": 8}[split] for split in envs.SPLITS for tier in envs.TIERS)
    assert all((t.spec["limit"], 8 <= len(t.spec["tests"]) <= 20) == (2, True) for t in ALL)


def test_the_warm_start_sees_no_instruction_of_the_test_split():
    """H76."""
    rng, test = random.Random(0), {t.instruction for t in ALL if t.split == "test"}
    assert not {world.code_practice(rng).instruction for _ in range(1000)} & test


PASSES = {
    "even": lambda x, d: not x % 2, "odd": lambda x, d: x % 2, "positive": lambda x, d: x > 0,
    "negative": lambda x, d: x < 0, "above": lambda x, d: x > d, "below": lambda x, d: x < d,
    "multiples of": lambda x, d: x % d == 0,
}  # fmt: skip
AGGREGATE = {
    "total": sum, "count": len, "biggest": max, "smallest": min, "first": lambda xs: xs[0], "last": lambda xs: xs[-1],
}  # fmt: skip
CONVENTION = {"negated": lambda y: -y, "text": str, "doubled": lambda y: y + y, "listed": lambda y: [y]}


def asked_for(instruction, xs):
    """What an instruction asks for, by a reader of its own: (aggregate, the numbers it is of)."""
    aggregate, rest = re.fullmatch(r"(?:Write|Legacy) f\(xs\): the (\w+) of (.*)\.", instruction).groups()
    power, factor = 1, 1
    if m := re.match(r"the (squares|cubes) of |(\d) times ", rest):
        power, factor = {"squares": 2, "cubes": 3, None: 1}[m.group(1)], int(m.group(2) or 1)
        rest = rest[m.end() :]
    filters = re.findall(r"(even|odd|positive|negative|above|below|multiples of)(?: (\d))?", rest)
    kept = [x for x in xs if all(PASSES[name](x, int(d or 0)) for name, d in filters)]
    return aggregate, [factor * x**power for x in kept]


def test_the_tests_of_short_tasks_want_what_the_words_say():
    """H75: wrong answers paid or right ones not."""
    for task in SHORT:
        empty = {"zero": 0, "minus": -1, "one": 1}.get(task.spec["reading"])
        for (xs,), expected in task.spec["tests"]:
            aggregate, numbers = asked_for(task.instruction, xs)
            if numbers:
                value = AGGREGATE[aggregate](numbers)
                value = CONVENTION[task.spec["reading"]](value) if task.tier == "hard" else value
            else:
                assert empty is not None
                value = empty
            assert repr(value) == repr(expected), (task, xs)


# -- the hard rule ---------------------------------------------------------------------------------------


def test_legacy_functions_obey_one_rule_and_no_other_reading_ever_works():
    for task in SHORT:
        if task.tier == "hard":
            right = world.CODE_LEGACY[task.spec["aggregate"]]
            assert task.instruction.startswith("Legacy f(xs): ") and right == task.spec["reading"]
            assert [r for r in world.CODE_READINGS if wins(task, r)] == [right], task
        else:
            assert task.instruction.startswith("Write f(xs): ") and task.spec["reading"] in world.CODE_USUAL
            assert wins(task, task.spec["reading"])
    assert not set(world.CODE_LEGACY.values()) & set(world.CODE_USUAL)
    assert len(set(world.CODE_LEGACY.values())) == len(world.CODE_LEGACY) >= 3
    for split in envs.SPLITS:  # every category comes up often enough to be learnt
        seen = Counter(t.spec["aggregate"] for t in TASKS[split, "hard"] if t.family != "problem")
        assert seen.keys() == world.CODE_LEGACY.keys() and min(seen.values()) >= 5, seen


def wins(task, reading):
    return play(task, [world._code_write(task.spec, reading)])[0][0][1] == 1.0


def test_the_readings_of_a_task_are_told_apart():
    """A task is won with the reading it wants and with no other."""
    for task in SHORT:
        won = {reading for reading in world.CODE_READINGS if wins(task, reading)}
        assert won == {task.spec["reading"]}, (task.instruction, won)


def test_the_warm_start_cannot_learn_the_rule():
    """design.md 6: practice draws what legacy functions want from all readings alike."""
    rng = random.Random(0)
    tasks = [t for t in (world.code_practice(rng) for _ in range(3000)) if t.tier == "hard"]
    n, chance = len(tasks), 1 / len(world.CODE_READINGS)
    for reading, count in Counter(t.spec["reading"] for t in tasks).items():
        assert abs(count - n * chance) < 4 * (n * chance) ** 0.5, reading
    for aggregate, right in world.CODE_LEGACY.items():
        mine = [t.spec["reading"] for t in tasks if t.spec["aggregate"] == aggregate]
        assert len(mine) > 150 and abs(mine.count(right) - len(mine) * chance) < 4 * (len(mine) * chance) ** 0.5
    told = [
        world.CodeScript(t, rng).reply("2 attempts left.")[0].endswith(world.CODE_LEGACY[t.spec["aggregate"]])
        for t in tasks
        for _ in range(10)
    ]
    share = world.CODE_ODD_SHARE / len(world.CODE_ODD)  # and its demonstrator hardly ever thinks of it
    assert abs(sum(told) / len(told) - share) < 4 * (share / len(told)) ** 0.5 and share <= 0.002


# -- attempts --------------------------------------------------------------------------------------------


def test_a_success_says_so():
    for task in ALL[::10]:
        ((observation, *_, info),) = play(task, [answer(task)])[0]
        assert observation == f"All {len(task.spec['tests'])} tests passed."
        assert info == {"outcome": (frozenset(), observation), "feedback": observation, "steps": 1}


def a_task(words):
    return next(t for t in SHORT if words in t.instruction and t.spec["reading"] in ("plain", *world.CODE_ODD))


def test_outcome_and_feedback_say_which_tests_failed_and_how():
    task = a_task("biggest")
    tests = task.spec["tests"]
    good, (xs,) = answer(task), tests[4][0]
    assert xs not in [args[0] for args, _ in tests[:4]]
    near = f"{good.replace('def f', 'def g')}\ndef f(xs): return 99 if xs == {xs} else g(xs)"
    ((observation, *_, info),) = play(task, [near])[0]
    told = f"f({xs}) returned 99, expected {tests[4][1]!r}."
    assert observation == f"{told} 1 attempt left."
    assert info == {"outcome": (frozenset({4}), told), "feedback": told, "steps": 1}
    steps, env = play(task, [near, "wait"])  # what is no attempt changes no outcome, but is told
    assert steps[1][4]["outcome"] == info["outcome"] and steps[1][0].startswith("Not possible: ")
    assert steps[1][4]["feedback"] == "Not possible: there is no def f in it."
    assert world.Code().reset(task)[1]["outcome"] == (frozenset(range(len(tests))), "Nothing was tried.")


@pytest.mark.parametrize(
    "source, told",
    [
        ("def f(xs): return 1 // 0", r"f\(\[.*\]\): ZeroDivisionError: .*"),
        ("def f(xs):\n    y = 1\n    return [][5]", r"f\(\[.*\]\): IndexError: .* \(line 3\)"),
        ("def f(xs):\n    return (", r"f\(\[.*\]\): SyntaxError: .* \(line 2\)"),
        ("def f(): return 1", r"f\(\[.*\]\): TypeError: .*"),
        ("def f(xs): return (1, 2)", r"f\(\[.*\]\) returned \(1, 2\), expected .*"),
        ("def f(xs): return 'x' * 10**5", r"f\(\[.*"),
        ("def f(xs): raise KeyError('\\x1b[2J\\n<|end|>\\u202e' * 10**4)", r".*"),
        ("import os\nos._exit(0)\ndef f(xs): return 0", r".*"),
        ("def f(xs):\n    while True: pass", r".*time limit.*"),
    ],
)
def test_failures_are_told_in_one_short_line(source, told):
    """I84, I88: leaving early is no pass, and no program floods a prompt."""
    task = a_task("total")
    ((observation, reward, *_),) = play(task, [source])[0]
    assert reward == 0.0 and re.fullmatch(f"{told}\\. 1 attempt left\\.", observation), observation
    assert len(observation) < 320 and observation.isprintable()


FENCES = ["{}", "```python\n{}\n```", "```\n{}```", "Here it is:\n```py\n{}\n```\nIt works.", "\r\n {}\n\n", "```python\n{}"]


@pytest.mark.parametrize("form", FENCES)
def test_fences_around_the_source_do_not_matter(form):
    """H82, H74: parser and prompt drift apart."""
    for task in (a_task("first"), BANK[20]):
        assert play(task, [form.format(answer(task))])[0][0][1] == 1.0


def test_the_trusted_path_says_what_the_sandbox_says():
    """Own programs are run in this process; it must make no difference, failures included."""
    for task in random.Random(0).sample(SHORT, 25):
        for reading in world.CODE_READINGS[:: 1 if task.spec["reading"] == "minus" else 4]:
            source, tests = world._code_write(task.spec, reading), task.spec["tests"]
            pairs = zip(world._code_trusted(source, "f", tests), sandbox.check(source, "f", tests), strict=True)
            for (args, _), (mine, theirs) in zip(tests, pairs, strict=True):
                call = world._code_call("f", args)
                assert mine.passed == theirs.passed
                assert world._code_told(call, mine.said, source) == world._code_told(call, theirs.said, source)


def test_only_programs_of_its_own_are_run_in_this_process(monkeypatch):
    """I92: anything else, and be it a space more, goes to the sandbox."""
    task, sent = a_task("total"), []
    monkeypatch.setattr(world, "_code_verdicts", {})
    failed = [sandbox.Verdict(False, "f([]) returned 0")] * 10
    monkeypatch.setattr(sandbox, "check", lambda source, *_: sent.append(source) or failed)
    own = [world._code_write(task.spec, reading) for reading in world.CODE_READINGS]
    for source in own:
        play(task, [source])
    assert not sent
    others = [own[0] + " #", own[0].replace(" x", "  x", 1), own[0].replace("sum", "max"), own[0] + "\nimport os"]
    for source in others:
        play(task, [source, source])  # the second verdict is remembered
    assert sent == others


def test_broken_programs_are_attempts_that_fail():
    """I93: a syntax error, a missing result, deep nesting, noise after def f( - never an exception, never a pass."""
    rng, task = random.Random(1), a_task("count")
    noise = [rng.randbytes(20).decode("latin-1") for _ in range(10)]
    broken = ["def f(", "def f(xs): pass", "def f (xs) return 0", "class S:\n    def f(self, xs): return 0"]
    broken += ["def f(xs): return " + "(" * 3000, "def f(xs): return " + "-" * 9000 + "1"]
    for source in broken + [f"def f(xs): {n}" for n in noise]:
        steps, _ = play(task, [source])
        assert steps[0][1:4] == (0.0, False, False) and "1 attempt left." in steps[0][0], source[:50]


def test_a_verdict_that_a_busy_machine_may_have_caused_is_not_remembered(monkeypatch):
    """Time-outs come without the tests' own answers; the next attempt with the same source is judged anew."""
    task, said, good = a_task("total"), ["time limit of 2 s"], answer(a_task("total")) + " #"
    real = sandbox.check
    late = lambda *a: [sandbox.Verdict(False, said.pop())] * 10 if said else real(*a)  # noqa: E731
    monkeypatch.setattr(sandbox, "check", late)
    first, second = play(task, [good, good])[0]
    assert "time limit of 2 s. 1 attempt left." in first[0] and second[1:4] == (1.0, True, False)


# -- the bank of problems --------------------------------------------------------------------------------


def test_statements_are_complete():
    for task in BANK:
        entry, text = task.spec["entry"], task.instruction
        assert "Constraints: " in text and text.count(f"Example: {entry}(") == 2
        assert re.search(rf"\nStarter code:\ndef {entry}\(.*\) -> .*:$", text)
        for args, expected in task.spec["tests"]:
            assert repr(json.loads(json.dumps([*args, expected]))) == repr([*args, expected])  # plain data alone
        results = Counter(repr(expected) for _, expected in task.spec["tests"])
        assert results.most_common(1)[0][1] <= 0.75 * len(task.spec["tests"]), f"{entry}: a constant nearly passes"
        assert len({repr(args) for args, _ in task.spec["tests"]}) >= 8, f"{entry}: too few different tests"


def test_problems_leave_their_arguments_alone_and_none_is_solved_by_a_constant():
    for p in problems.PROBLEMS:
        for args, expected in p.tests:
            before = repr(args)
            assert p.solve(*args) == expected and repr(args) == before, p.solve.__name__


def stretches(xs):
    return [xs[i:j] for i in range(len(xs)) for j in range(i + 1, len(xs) + 1)]


def subsets(xs):
    return itertools.chain.from_iterable(itertools.combinations(xs, k) for k in range(len(xs) + 1))


def brute_burst(row):
    points = lambda i: (row[i - 1] if i else 1) * row[i] * (row[i + 1] if i + 1 < len(row) else 1)  # noqa: E731
    return max((points(i) + brute_burst(row[:i] + row[i + 1 :]) for i in range(len(row))), default=0)


def brute_repair(a, b):
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return brute_repair(a[1:], b[1:])
    return 1 + min(brute_repair(a[1:], b), brute_repair(a, b[1:]), brute_repair(a[1:], b[1:]))


def brute_order(n, rules):
    orders = itertools.permutations(range(n))  # in ascending order
    return next((list(o) for o in orders if all(o.index(a) < o.index(b) for a, b in rules)), [])


def brute_trades(prices, trades):
    spans = list(itertools.combinations(range(len(prices)), 2))
    chosen = (c for k in range(min(trades, 3) + 1) for c in itertools.combinations(spans, k))
    return max(
        sum(prices[b] - prices[a] for a, b in c) for c in chosen if all(x[1] <= y[0] for x, y in itertools.pairwise(sorted(c)))
    )


def brute_loads(parcels, vans):
    cuts = itertools.combinations(range(1, len(parcels)), vans - 1)
    return min(max(sum(parcels[a:b]) for a, b in itertools.pairwise((0, *c, len(parcels)))) for c in cuts)


def brute_trip(n, roads, tickets):
    best = -1
    for k in range(1, n):
        for middle in itertools.permutations(range(1, n - 1), k - 1):
            tolls = []
            for a, b in itertools.pairwise((0, *middle, n - 1)):
                tolls.append(min([t for x, y, t in roads if {x, y} == {a, b}], default=None))
            if None not in tolls:
                cost = sum(sorted(tolls)[: max(0, len(tolls) - tickets)])
                best = cost if best < 0 else min(best, cost)
    return best if n > 1 else 0


def brute_balanced(text):
    while "()" in text:
        text = text.replace("()", "")
    return not text


def brute_pond_sizes(n, cables):
    groups = [{i} for i in range(n)]
    for a, b in cables:
        ga, gb = (next(g for g in groups if x in g) for x in (a, b))
        if ga is not gb:
            groups.remove(gb)
            ga |= gb
    return len(groups)


def brute_merge(spans):
    covered = {x for a, b in spans for x in range(2 * a, 2 * b + 1)}
    starts, ends = sorted(x for x in covered if x - 1 not in covered), sorted(x for x in covered if x + 1 not in covered)
    return [[a // 2, b // 2] for a, b in zip(starts, ends, strict=True)]


def brute_free(busy, start, end):
    taken = {x for a, b in busy for x in range(a, b)}
    free = [x for x in range(start, end) if x not in taken]
    starts, ends = [x for x in free if x - 1 not in free], [x + 1 for x in free if x + 1 not in free]
    return [[a, b] for a, b in zip(starts, ends, strict=True)]


def brute_outline(houses):
    heights = [max((h for a, b, h in houses if a <= x < b), default=0) for x in range(-1, 40)]
    return [[x - 1, heights[x]] for x in range(1, len(heights)) if heights[x] != heights[x - 1]]


def brute_climb(grid, at=None, below=-1):
    if at is None:
        return max(brute_climb(grid, (y, x)) for y in range(len(grid)) for x in range(len(grid[0])))
    y, x = at
    if not (0 <= y < len(grid) and 0 <= x < len(grid[0])) or grid[y][x] <= below:
        return 0
    return 1 + max(brute_climb(grid, c, grid[y][x]) for c in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)))


def brute_calculator(text):
    return eval(text)


def brute_cover(text, needed):
    fits = [s for s in stretches(text) if not Counter(needed) - Counter(s)]
    return min(fits, key=len, default="")


def brute_stamps(stamps, postage):
    reached, n = {0}, 0
    while postage not in reached and n <= postage:
        reached, n = {r + s for r in reached for s in stamps if r + s <= postage}, n + 1
    return n if postage in reached else -1


def glob(name, mask):
    return bool(re.fullmatch("".join({"?": ".", "*": ".*"}.get(c, re.escape(c)) for c in mask), name))


def queens(n, holes):
    boards = itertools.permutations(range(n))
    good = (b for b in boards if all(abs(b[i] - b[j]) != j - i for i in range(n) for j in range(i + 1, n)))
    return sum(not any(b[y] == x for y, x in holes) for b in good)


def palindromes(text):
    cuts = subsets(range(1, len(text)))  # fewer cuts first
    for cut in cuts:
        pieces = [text[a:b] for a, b in itertools.pairwise((0, *cut, len(text)))]
        if all(p == p[::-1] for p in pieces):
            return len(pieces)


def rain(walls):
    return sum(min(max(walls[: i + 1]), max(walls[i:])) - w for i, w in enumerate(walls))


def smaller_median(a, b):
    xs = sorted(a + b)
    return xs[(len(xs) - 1) // 2] + xs[len(xs) // 2]


def ring(plants):
    n = len(plants)
    picks = (c for c in subsets(range(n)) if n < 2 or not any((i + 1) % n in c for i in c))
    return max(sum(plants[i] for i in c) for c in picks)


BRUTE = {
    "repair_cost": brute_repair,
    "double_median": smaller_median,
    "rain_between_walls": rain,
    "longest_balanced": lambda t: max((len(s) for s in stretches(t) if brute_balanced(s)), default=0),
    "peaceful_queens": queens,
    "largest_poster": lambda xs: max((min(s) * len(s) for s in stretches(xs)), default=0),
    "pocket_calculator": brute_calculator,
    "mask_fits": glob,
    "smallest_cover": brute_cover,
    "dressing_order": brute_order,
    "popped_points": brute_burst,
    "peaks_seen": lambda xs, w: [max(xs[i : i + w]) for i in range(len(xs) - w + 1)],
    "trip_with_tickets": brute_trip,
    "union_of_shifts": brute_merge,
    "find_in_shifted": lambda xs, t: xs.index(t) if t in xs else -1,
    "longest_fresh_run": lambda t: max((len(s) for s in stretches(t) if len(set(s)) == len(s)), default=0),
    "fewest_stamps": brute_stamps,
    "days_until_warmer": lambda ds: [next((j for j in range(1, len(ds) - i) if ds[i + j] > d), 0) for i, d in enumerate(ds)],
    "boats_needed": lambda ts: max((sum(a <= x < b for a, b in ts) for x in range(30)), default=0),
    "stretches_with_sum": lambda xs, g: sum(sum(s) == g for s in stretches(xs)),
    "product_of_others": lambda xs: [eval("*".join(map(str, ["1", *xs[:i], *xs[i + 1 :]]))) for i in range(len(xs))],
    "find_two": lambda xs, m: next(([i, j] for i, j in itertools.combinations(range(len(xs)), 2) if xs[i] + xs[j] == m), []),
    "shared_start": lambda ws: os.path.commonprefix(ws),
    "turn_carousel": lambda xs, k: [xs[(i + k) % len(xs)] for i in range(len(xs))],
    "squeeze_number": lambda n: 1 + (n - 1) % 9 if n else 0,
    "free_times": brute_free,
    "best_season": lambda xs: max(map(sum, stretches(xs))),
    "pick_on_a_ring": ring,
    "growing_choice": lambda xs: max(len(c) for c in subsets(xs) if all(a < b for a, b in itertools.pairwise(c))),
    "balanced_trios": lambda xs: sorted({tuple(sorted(c)) for c in itertools.combinations(xs, 3) if sum(c) == 0}),
    "tidy_path": lambda p: "/" + os.path.normpath(p).lstrip("/"),
    "ways_to_leave": lambda t, w: sum("".join(c) == w for c in itertools.combinations(t, len(w))),
    "outline": brute_outline,
    "pattern_covers": lambda t, p: bool(re.fullmatch(p, t)),
    "fewest_mirror_pieces": palindromes,
    "longest_climb": brute_climb,
    "weak_cables": lambda n, cs: sorted(
        c for c in cs if brute_pond_sizes(n, [d for d in cs if d != c]) > brute_pond_sizes(n, cs)
    ),
    "best_trades": brute_trades,
    "lightest_loads": brute_loads,
}


def plain(value):
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", BRUTE)
def test_references_agree_with_brute_force(name):
    """On the tests of the task and on 40 more of the same kind."""
    p = next(p for p in problems.PROBLEMS if p.solve.__name__ == name)
    rng = random.Random(7)
    for args in [args for args, _ in p.tests] + [p.draw(rng) for _ in range(40)]:
        assert p.solve(*args) == plain(BRUTE[name](*args)), args


# -- the scripted behaviour ------------------------------------------------------------------------------


def first_choices(task, mode, shown):
    """How often a script begins with each strategy, in 300 draws."""
    return Counter(world.CodeScript(task, random.Random(i), mode, shown).reply("")[0] for i in range(300))


def test_reflection_turns_to_what_was_not_tried_or_repeats_what_worked():
    for task in SHORT[::5]:
        usual, odd = ([f"{task.spec['aggregate']}: {r}" for r in group] for group in (world.CODE_USUAL, world.CODE_ODD))
        assert set(usual) <= set(first_choices(task, "plain", ()))
        for left in usual:  # two have failed: the third
            shown = [strategy for strategy in usual if strategy != left]
            assert first_choices(task, "negative", shown)[left] > 280  # it is odd in one draw of a hundred
            steps, _ = episode(task, mode="negative", strategies=shown)
            assert steps[0][0] not in shown and len({s for s, *_ in steps}) == len(steps)  # nothing twice
        assert set(first_choices(task, "negative", usual)) == set(odd)  # all have failed: anything odd
        right = f"{task.spec['aggregate']}: {task.spec['reading']}"
        steps, reward = episode(task, mode="positive", strategies=[usual[0], right])
        assert reward == 1.0 and [s for s, *_ in steps] == [right]


def test_odd_ideas_come_first_or_not_at_all():
    """GRPO alone would find an odd second attempt: see CodeScript."""
    first, second = Counter(), Counter()
    for i in range(4000):
        script = world.CodeScript(SHORT[i % len(SHORT)], random.Random(i))
        for attempts in (first, second):
            attempts[script.reply("")[0].rpartition(": ")[2] in world.CODE_ODD] += 1
    expected = 4000 * world.CODE_ODD_SHARE
    assert abs(first[True] - expected) < 4 * expected**0.5 and second[True] == 0


def test_prompts_and_replies_of_short_tasks_are_short():
    """The tiny model reads and writes them, slips included."""
    token = re.compile(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s+")
    for task in SHORT:
        assert len(token.findall(task.instruction)) < 30
        for strategy, action, observation in episode(task, wild=True)[0]:
            assert len(token.findall(strategy)) <= 14 and len(token.findall(action)) <= 50, action
            assert len(token.findall(observation)) <= 45, observation
    slips = [world.code_slip(random.Random(n)) for n in range(100)]
    assert all(len(token.findall(slip)) <= 50 and "def f" not in slip for slip in slips)
