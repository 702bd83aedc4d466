"""A bank of small programming problems for the world `code`, written for this project.  (stdlib only)

A problem is one function: its docstring is the statement, its first line the starter code, its body the
reference solution, and its decorator says split, tier and arguments to test it with.  The first two are
the examples in the statement; `draw` makes more of them from a generator seeded with the name.  What a
test expects is what the reference returns (tests/test_code.py checks the trickier ones against brute force).

Rules: arguments and results are plain data (int, str, bool, None and lists of them), the references do
not change their arguments and need no other module than those they import themselves.
"""

import copy
import inspect
import random
from dataclasses import dataclass
from functools import cached_property

DRAWN = 9  # tests that `draw` makes


@dataclass(frozen=True)
class Problem:
    split: str
    tier: str
    solve: object  # the reference solution
    given: tuple  # of argument tuples
    draw: object  # random.Random -> argument tuple

    @cached_property
    def words(self) -> str:
        """The statement, on one line."""
        return " ".join(self.solve.__doc__.split())

    @cached_property
    def head(self) -> str:
        """The starter code."""
        return f"def {self.solve.__name__}{inspect.signature(self.solve)}:"

    @cached_property
    def tests(self) -> tuple:
        """((arguments, expected result), ...)"""
        rng = random.Random(f"problem/{self.solve.__name__}")
        cases = [*self.given, *(self.draw(rng) for _ in range(DRAWN))]
        return tuple((args, self.solve(*copy.deepcopy(args))) for args in cases)


PROBLEMS: list[Problem] = []


def problem(split: str, tier: str, *given: tuple, draw):
    """Put the decorated function into the bank."""

    def keep(solve):
        PROBLEMS.append(Problem(split, tier, solve, given, draw))
        return solve

    return keep


def _ints(r: random.Random, most: int = 9, low: int = -9, high: int = 9, least: int = 0) -> list[int]:
    return [r.randint(low, high) for _ in range(r.randint(least, most))]


def _text(r: random.Random, letters: str = "abc", most: int = 9, least: int = 0) -> str:
    return "".join(r.choice(letters) for _ in range(r.randint(least, most)))


def _grid(r: random.Random, low: int, high: int, most: int = 5) -> list[list[int]]:
    width = r.randint(1, most)
    return [[r.randint(low, high) for _ in range(width)] for _ in range(r.randint(1, most))]


def _spans(r: random.Random, most: int = 6, high: int = 20) -> list[list[int]]:
    return [sorted(r.sample(range(high + 1), 2)) for _ in range(r.randint(1, most))]


def _edges(r: random.Random, n: int, share: float) -> list[list[int]]:
    """Pairs a < b of 0..n-1, in random order."""
    edges = [[a, b] for a in range(n) for b in range(a + 1, n) if r.random() < share]
    r.shuffle(edges)
    return edges


# ------------------------------------------------------------------------------------------------------
# train, easy
# ------------------------------------------------------------------------------------------------------


@problem("train", "easy", ([3, 1, 2],), ([5, -5, 4],), ([],), draw=lambda r: (_ints(r),))
def running_total(xs: list[int]) -> list[int]:
    """Return a list whose entry at each position is the sum of xs up to and including that position.
    Constraints: xs has 0 to 1000 integers."""
    totals, total = [], 0
    for x in xs:
        total += x
        totals.append(total)
    return totals


@problem("train", "easy", ([4, 9, 9, 7],), ([5, 5],), ([],), ([-3, -8],), draw=lambda r: (_ints(r, 6, 0, 4),))
def runner_up(scores: list[int]) -> int | None:
    """Several players may share a score. Return the second highest of the different scores, or None if
    there are fewer than two different ones. Constraints: 0 to 1000 scores."""
    different = sorted(set(scores))
    return different[-2] if len(different) > 1 else None


@problem("train", "easy", ("Open the Door",), ("rhythm",), ("",), ("AEIOU aeiou",),
         draw=lambda r: (_text(r, "aEbc IoUx", 12),))  # fmt: skip
def count_vowels(text: str) -> int:
    """Count the letters a, e, i, o and u of a text, in upper and lower case. Constraints: the text has at
    most 1000 characters."""
    return sum(c in "aeiou" for c in text.lower())


@problem("train", "easy", ("Was it a car or a cat I saw?",), ("No way, Jose",), ("",), ("?!",), ("1a2",),
         draw=lambda r: ((half := _text(r, "aB, 1", 4, 2)) + r.choice(("", "b?", "xa")) + half[::-1].swapcase(),))  # fmt: skip
def reads_both_ways(text: str) -> bool:
    """Say whether a text reads the same forwards and backwards when only its letters and digits count and
    upper and lower case are the same. Constraints: at most 1000 ASCII characters."""
    kept = [c.lower() for c in text if c.isalnum()]
    return kept == kept[::-1]


@problem("train", "easy", ([1, 4, 6], [2, 4]), ([], [3]), ([], []),
         draw=lambda r: (sorted(_ints(r)), sorted(_ints(r))))  # fmt: skip
def merge_queues(a: list[int], b: list[int]) -> list[int]:
    """Two lists are sorted in ascending order. Return one sorted list with all their entries, repeated
    ones included. Constraints: each list has 0 to 1000 integers."""
    return sorted(a + b)


@problem("train", "easy", ([3, 1, 3, 2, 1],), ([7, 7, 7],), ([],), draw=lambda r: (_ints(r, 9, 0, 4),))
def drop_repeats(xs: list[int]) -> list[int]:
    """Keep only the first occurrence of every value; the order stays as it is. Constraints: xs has 0 to
    1000 integers."""
    return list(dict.fromkeys(xs))


@problem("train", "easy", ([1, 2, 3, 4], 1), ([1, 2, 3], 5), ([], 3), ([1, 2, 3], -1), ([4], 0),
         draw=lambda r: (_ints(r), r.randint(-9, 20)))  # fmt: skip
def turn_carousel(seats: list[int], k: int) -> list[int]:
    """Move every seat k places towards the front; what leaves the front comes in again at the back. A
    negative k moves towards the back. Constraints: 0 to 1000 seats, -10000 <= k <= 10000."""
    k = k % len(seats) if seats else 0
    return seats[k:] + seats[:k]


@problem("train", "easy", (6, 2, 3), (5, 3, 5), (0, 2, 2), (4, 2, 2),
         draw=lambda r: (r.randint(1, 20), r.randint(1, 5), r.randint(1, 5)))  # fmt: skip
def ring_bells(n: int, a: int, b: int) -> list[str]:
    """For every minute from 1 to n return what is heard: "ding" if a divides the minute, "dong" if b
    divides it, "dingdong" if both do, and otherwise the minute as text. Constraints: 0 <= n <= 1000,
    a and b are at least 1."""
    return [("ding" * (i % a == 0) + "dong" * (i % b == 0)) or str(i) for i in range(1, n + 1)]


@problem("train", "easy", (9875,), (7,), (0,), (10**12,), draw=lambda r: (r.randint(0, 10 ** r.randint(1, 12)),))
def squeeze_number(n: int) -> int:
    """Replace a number by the sum of its decimal digits, again and again, until one digit is left. Return
    that digit. Constraints: 0 <= n <= 10**12."""
    while n > 9:
        n = sum(map(int, str(n)))
    return n


@problem("train", "easy", ("the quick brown fox",), ("one two six",), ("",), ("  a   bb ",),
         draw=lambda r: (" ".join(_text(r, "xyz", 5, 1) for _ in range(r.randint(1, 6))),))  # fmt: skip
def longest_word(text: str) -> str:
    """Words are separated by one or more spaces. Return the longest word; among equally long ones the
    first; "" if there is none. Constraints: at most 1000 letters and spaces."""
    return max(text.split(), key=len, default="")


@problem("train", "easy", (["tea", "team", "tear"],), (["sun", "moon"],), ([],), (["one"],), (["", "a"],),
         draw=lambda r: ([r.choice(("a", "ab", "aba")) + _text(r, "ab", 3) for _ in range(r.randint(1, 4))],))  # fmt: skip
def shared_start(words: list[str]) -> str:
    """Return the longest text that all the words start with, "" if there are no words. Constraints: 0 to
    100 words of 0 to 50 lower-case letters."""
    low, high = min(words, default=""), max(words, default="")
    n = 0
    while n < len(low) and low[n] == high[n]:
        n += 1
    return low[:n]


@problem("train", "easy", ([4, 6, 1, 9], 10), ([5, 2], 10), ([5, 5, 5], 10), ([], 0), ([0], 0),
         draw=lambda r: (_ints(r), r.randint(-9, 9)))  # fmt: skip
def find_two(prices: list[int], money: int) -> list[int]:
    """Find two different positions i < j whose prices add up to exactly `money` and return [i, j]. If there
    are several, take the smallest i and then the smallest j; if there are none, return []. Constraints: 0
    to 1000 prices, negative ones allowed."""
    for i, price in enumerate(prices):
        if money - price in prices[i + 1 :]:
            return [i, prices.index(money - price, i + 1)]
    return []


@problem("train", "easy", ("Dirty Room", "dormitory"), ("apple", "papal"), ("", " "), ("aab", "abb"),
         draw=lambda r: ((t := _text(r, "abC ", 6)), r.choice((t[::-1].upper(), _text(r, "abc", 6)))))  # fmt: skip
def same_letters(a: str, b: str) -> bool:
    """Say whether b can be written with exactly the letters of a, each as often. Spaces and case do not
    count. Constraints: at most 1000 letters and spaces each."""
    return sorted(a.replace(" ", "").lower()) == sorted(b.replace(" ", "").lower())


@problem("train", "easy", ([0, 3, 0, 5],), ([1, 2],), ([0, 0],), ([],), draw=lambda r: (_ints(r, 9, -1, 2, 4),))
def zeros_last(xs: list[int]) -> list[int]:
    """Move all zeros to the end of the list; everything else keeps its order. Constraints: xs has 0 to 1000
    integers."""
    return sorted(xs, key=lambda x: x == 0)


# ------------------------------------------------------------------------------------------------------
# train, medium
# ------------------------------------------------------------------------------------------------------


@problem("train", "medium", ([[1, 4], [3, 6], [8, 9]],), ([[5, 6], [1, 5]],), ([],), ([[1, 9], [2, 3]],),
         draw=lambda r: (_spans(r),))  # fmt: skip
def union_of_shifts(shifts: list[list[int]]) -> list[list[int]]:
    """A shift [a, b] covers the time from a to b, a < b, ends included. Unite shifts that overlap or touch
    and return the resulting shifts in ascending order. Constraints: 0 to 1000 shifts in any order."""
    united: list[list[int]] = []
    for a, b in sorted(shifts):
        if united and a <= united[-1][1]:
            united[-1][1] = max(b, united[-1][1])
        else:
            united.append([a, b])
    return united


@problem(
    "train",
    "medium",
    ("(a[b]{c})",),
    ("(]",),
    ("",),
    ("((()",),
    ("x+y",),
    (")(",),
    draw=lambda r: ((t := _text(r, "(([{", 4)) + r.choice(("", ")")) + t[::-1].translate(str.maketrans("([{", ")]}")),),
)
def bracket_depth(code: str) -> int:
    """The brackets in a text are (), [] and {}. Return how deeply they are nested, 0 if there are none, or
    -1 if they are not balanced: each must be closed by its own kind, in the right order. Other characters
    do not matter. Constraints: at most 1000 characters."""
    closes, stack, deepest = {")": "(", "]": "[", "}": "{"}, [], 0
    for c in code:
        if c in "([{":
            stack.append(c)
            deepest = max(deepest, len(stack))
        elif c in closes and (not stack or stack.pop() != closes[c]):
            return -1
    return -1 if stack else deepest


def _postfix(r: random.Random, depth: int = 3) -> list[str]:
    if depth == 0 or r.random() < 0.2:
        return [str(r.randint(-9, 9))]
    return _postfix(r, depth - 1) + _postfix(r, depth - 1) + [r.choice("+-*")]


@problem("train", "medium", (["2", "3", "+", "4", "*"],), (["5"],), (["7", "-2", "-"],), draw=lambda r: (_postfix(r),))
def stack_machine(tokens: list[str]) -> int:
    """A stack machine reads tokens from left to right. An integer is pushed; "+", "-" or "*" takes the two
    topmost values off, the lower one being the left operand, and pushes the result. Return the one value
    that is left. Constraints: 1 to 1000 tokens that form a valid program."""
    stack: list[int] = []
    for token in tokens:
        if token in ("+", "-", "*"):
            b, a = stack.pop(), stack.pop()
            stack.append(a + b if token == "+" else a - b if token == "-" else a * b)
        else:
            stack.append(int(token))
    return stack[0]


@problem("train", "medium", ([6, 8, 1, 3], 1), ([6, 8, 1, 3], 5), ([], 4), ([2], 2), ([1, 2, 3], 3),
         draw=lambda r: ((s := sorted(r.sample(range(30), 7)))[(k := r.randrange(7)):] + s[:k], r.choice((*s, 31))))  # fmt: skip
def find_in_shifted(xs: list[int], target: int) -> int:
    """A strictly ascending list was cut at some place and its two parts were swapped. Return the position of
    target, or -1 if it is missing. Aim at O(log n). Constraints: 0 to 10000 different integers."""
    low, high = 0, len(xs) - 1
    while low <= high:
        middle = (low + high) // 2
        if xs[middle] == target:
            return middle
        if xs[low] <= xs[middle]:  # the left half is in order
            if xs[low] <= target < xs[middle]:
                high = middle - 1
            else:
                low = middle + 1
        elif xs[middle] < target <= xs[high]:
            low = middle + 1
        else:
            high = middle - 1
    return -1


@problem("train", "medium", ([[1, 2, 3], [4, 5, 6]],), ([[1], [2]],), ([[7]],), draw=lambda r: (_grid(r, 0, 9),))
def snail_walk(grid: list[list[int]]) -> list[int]:
    """Walk over a rectangular grid like a snail shell: from the top left along the top row, down the last
    column, back along the bottom row, up the first column, and so on inwards. Return the numbers in the
    order in which they are met. Constraints: 1 to 50 rows and columns."""
    rows, walk = [list(row) for row in grid], []
    while rows:
        walk += rows.pop(0)
        rows = [list(row) for row in zip(*rows, strict=True)][::-1]  # turn what is left to the left
    return walk


@problem("train", "medium", ("abcab",), ("aaa",), ("",), ("abba",), draw=lambda r: (_text(r, "abcde", 15),))
def longest_fresh_run(text: str) -> int:
    """Return the length of the longest stretch of neighbouring characters in which no character occurs
    twice. Constraints: at most 10000 characters."""
    start, best, seen = 0, 0, {}
    for i, c in enumerate(text):
        start = max(start, seen.get(c, -1) + 1)
        seen[c] = i
        best = max(best, i - start + 1)
    return best


@problem("train", "medium", ([2, 3, 4],), ([5, 0, 2],), ([0, 0],), ([7],), draw=lambda r: (_ints(r, 7, -4, 5, 1),))
def product_of_others(xs: list[int]) -> list[int]:
    """Return for each position the product of all the numbers at the other positions (1 if there is no
    other), without division. Constraints: 1 to 1000 integers."""
    result, left, right = [1] * len(xs), 1, 1
    for i in range(len(xs)):
        result[i] *= left
        left *= xs[i]
        result[-1 - i] *= right
        right *= xs[-1 - i]
    return result


@problem("train", "medium", ([[1, 1, 0], [0, 0, 1]],), ([[0]],), ([[1, 0, 1], [0, 1, 0], [1, 0, 1]],), ([[1, 1], [1, 1]],),
         draw=lambda r: (_grid(r, 0, 1),))  # fmt: skip
def count_ponds(grid: list[list[int]]) -> int:
    """In a rectangular grid 1 is water and 0 is land. Water cells that share a side belong to the same pond.
    Count the ponds. Constraints: 1 to 50 rows and columns."""
    water = {(y, x) for y, row in enumerate(grid) for x, cell in enumerate(row) if cell}
    ponds = 0
    while water:
        ponds += 1
        edge = [water.pop()]
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & water
            water -= near
            edge += near
    return ponds


@problem("train", "medium", ([1, 3, 4], 6), ([5], 7), ([2], 0), ([7, 3], 12), ([9, 6, 1], 12),
         draw=lambda r: (r.sample(range(1, 10), r.randint(1, 3)), r.randint(0, 30)))  # fmt: skip
def fewest_stamps(stamps: list[int], postage: int) -> int:
    """There are as many stamps of each value as one likes. Return the smallest number of stamps whose values
    add up to exactly the postage, or -1 if that cannot be done. Constraints: 1 to 10 different positive
    values, 0 <= postage <= 2000."""
    fewest = [0] + [postage + 1] * postage
    for amount in range(1, postage + 1):
        fewest[amount] = min([fewest[amount - s] + 1 for s in stamps if s <= amount], default=postage + 1)
        fewest[amount] = min(fewest[amount], postage + 1)
    return fewest[postage] if fewest[postage] <= postage else -1


def _knitting(r: random.Random, depth: int = 2) -> str:
    parts = (_text(r, "kp", 2, 1) if depth == 0 or r.random() < 0.5 else f"{r.randint(1, 3)}({_knitting(r, depth - 1)})"
             for _ in range(r.randint(1, 3)))  # fmt: skip
    return "".join(parts)


@problem("train", "medium", ("k2(pk)",), ("2(k3(p))",), ("",), ("10(k)p",), ("0(kk)p",), draw=lambda r: (_knitting(r),))
def knit(pattern: str) -> str:
    """A knitting pattern is made of stitches (lower-case letters) and of repeats: a number, then a pattern
    in parentheses that is knitted that often; repeats may be nested. Return all stitches in order.
    Constraints: a valid pattern, its result has at most 10000 stitches."""
    stack, number = [""], ""
    counts: list[int] = []
    for c in pattern:
        if c.isdigit():
            number += c
        elif c == "(":
            counts.append(int(number))
            stack.append("")
            number = ""
        elif c == ")":
            inner = stack.pop() * counts.pop()
            stack[-1] += inner
        else:
            stack[-1] += c
    return stack[0]


@problem("train", "medium", ("b a b c a b", 2), ("x y", 1), ("", 3), ("z z y", 5),
         draw=lambda r: (" ".join(r.choices(["ant", "bee", "cat", "dog"], k=r.randint(1, 9))), r.randint(1, 3)))  # fmt: skip
def favourite_words(text: str, k: int) -> list[str]:
    """Return the k most frequent words of a text, the most frequent first; words that are equally frequent
    stand in alphabetical order. If there are fewer than k different words, return all of them. Constraints:
    words of lower-case letters separated by single spaces, k >= 1."""
    words = text.split()
    return sorted(set(words), key=lambda w: (-words.count(w), w))[:k]


@problem("train", "medium", ([20, 22, 19, 25],), ([9, 8],), ([],), ([5, 5, 6],), draw=lambda r: (_ints(r, 10, 10, 30),))
def days_until_warmer(degrees: list[int]) -> list[int]:
    """Return for each day how many days pass until the first day that is strictly warmer, or 0 if none comes.
    Aim at O(n). Constraints: 0 to 10000 days."""
    days, waiting = [0] * len(degrees), []
    for i, d in enumerate(degrees):
        while waiting and degrees[waiting[-1]] < d:
            j = waiting.pop()
            days[j] = i - j
        waiting.append(i)
    return days


@problem("train", "medium", ([[1, 4], [2, 6], [4, 5]],), ([[1, 2], [3, 4]],), ([],), ([[1, 9], [1, 9], [2, 3]],),
         draw=lambda r: (_spans(r, 8),))  # fmt: skip
def boats_needed(trips: list[list[int]]) -> int:
    """A trip [a, b] uses one boat from time a until just before time b, a < b; at b the boat is free again.
    Return how many boats are needed for all trips. Constraints: 0 to 1000 trips in any order."""
    changes = sorted([(b, -1) for _, b in trips] + [(a, 1) for a, _ in trips])  # returns before departures
    out = most = 0
    for _, change in changes:
        out += change
        most = max(most, out)
    return most


@problem("train", "medium", ([1, 2, 3, -3], 3), ([0, 0], 0), ([], 0), ([4], 4),
         draw=lambda r: (_ints(r, 12, -3, 3), r.randint(-2, 4)))  # fmt: skip
def stretches_with_sum(xs: list[int], goal: int) -> int:
    """Count the stretches of one or more neighbouring entries whose sum is exactly `goal`. Constraints: 0 to
    10000 integers, negative ones too."""
    seen, total, count = {0: 1}, 0, 0
    for x in xs:
        total += x
        count += seen.get(total - goal, 0)
        seen[total] = seen.get(total, 0) + 1
    return count


# ------------------------------------------------------------------------------------------------------
# train, hard
# ------------------------------------------------------------------------------------------------------


@problem("train", "hard", ("sitting", "kitten"), ("ab", ""), ("", ""), ("abc", "bcd"),
         draw=lambda r: (_text(r, "abc", 7), _text(r, "abc", 7)))  # fmt: skip
def repair_cost(a: str, b: str) -> int:
    """One repair inserts, deletes or replaces a single character. Return the smallest number of repairs that
    turn a into b. Constraints: at most 200 characters each."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row, last = [i], row
        for j, y in enumerate(b, 1):
            row.append(min(row[-1] + 1, last[j] + 1, last[j - 1] + (x != y)))
    return row[-1]


@problem("train", "hard", ([1, 5], [2, 9, 10]), ([4], [8]), ([], [3]), ([1, 1], []), ([1, 2, 3], [4, 5, 6]),
         draw=lambda r: (sorted(_ints(r, 8, 0, 20, 1)), sorted(_ints(r, 8, 0, 20))))  # fmt: skip
def double_median(a: list[int], b: list[int]) -> int:
    """Two lists are sorted in ascending order. Return twice the median of all their numbers together: twice
    the middle one, or the sum of the two middle ones. Aim at O(log n). Constraints: at least one number,
    at most 10000."""
    if len(a) > len(b):
        a, b = b, a
    n = len(a) + len(b)
    half, low, high = (n + 1) // 2, 0, len(a)
    inf = float("inf")
    while True:
        i = (low + high) // 2  # i numbers of a and j of b are the lower half
        j = half - i
        a_left, a_right = a[i - 1] if i else -inf, a[i] if i < len(a) else inf
        b_left, b_right = b[j - 1] if j else -inf, b[j] if j < len(b) else inf
        if a_left > b_right:
            high = i - 1
        elif b_left > a_right:
            low = i + 1
        else:
            left = max(a_left, b_left)
            return 2 * left if n % 2 else left + min(a_right, b_right)


@problem("train", "hard", ([3, 0, 2],), ([1, 2, 3],), ([],), ([4, 1, 0, 2, 1, 3],), draw=lambda r: (_ints(r, 12, 0, 6),))
def rain_between_walls(walls: list[int]) -> int:
    """Walls of the given heights and width 1 stand side by side. Return how many unit squares of rain stay
    above them between higher walls. Constraints: 0 to 10000 walls of height 0 or more."""
    kept, left, right, i, j = 0, 0, 0, 0, len(walls) - 1
    while i <= j:
        if left <= right:
            left = max(left, walls[i])
            kept += left - walls[i]
            i += 1
        else:
            right = max(right, walls[j])
            kept += right - walls[j]
            j -= 1
    return kept


@problem("train", "hard", ("())()()",), ("((",), ("",), ("(()())",), ("()(()",), draw=lambda r: (_text(r, "()", 16),))
def longest_balanced(text: str) -> int:
    """A text has the characters ( and ) alone. Return the length of its longest balanced stretch of
    neighbouring characters. Constraints: at most 10000 characters."""
    best, stack = 0, [-1]  # positions that no balanced stretch reaches across
    for i, c in enumerate(text):
        if c == "(":
            stack.append(i)
            continue
        stack.pop()
        if not stack:
            stack.append(i)
        best = max(best, i - stack[-1])
    return best


def _ladder(r: random.Random) -> tuple:
    words = sorted({_text(r, "abc", 3, 3) for _ in range(9)})
    start, end = r.sample(words, 2)
    r.shuffle(words)
    return start, end, words


@problem("train", "hard", ("cat", "dog", ["cot", "cog", "dog"]), ("cat", "dog", ["dog"]), ("ab", "ab", ["ab"]),
         ("aa", "bb", ["ab", "ba"]), draw=_ladder)  # fmt: skip
def letter_steps(start: str, end: str, words: list[str]) -> int:
    """One step changes one letter of a word; every word reached has to be in the list. Return the smallest
    number of steps from start to end (0 if they are equal), or -1 if there is no way. Constraints: 1 to 500
    lower-case words, all of the same length."""
    edge, steps, left = {start}, 0, set(words) - {start}
    while edge:
        if end in edge:
            return steps
        edge = {w for w in left if any(sum(a != b for a, b in zip(w, e, strict=True)) == 1 for e in edge)}
        left -= edge
        steps += 1
    return -1


@problem("train", "hard", (4, []), (4, [[0, 1]]), (1, []), (3, []), (6, []), (5, [[2, 2]]),
         draw=lambda r: ((n := r.randint(2, 6)), [[r.randrange(n), r.randrange(n)]]))  # fmt: skip
def peaceful_queens(n: int, holes: list[list[int]]) -> int:
    """Count the ways to put n queens on an n by n board so that none attacks another along a row, a column
    or a diagonal. No queen may stand on a hole, given as [row, column]; queens attack across holes.
    Constraints: 1 <= n <= 8."""
    blocked = {(y, x) for y, x in holes}

    def place(y: int, queens: list[int]) -> int:
        if y == n:
            return 1
        return sum(
            place(y + 1, queens + [x])
            for x in range(n)
            if (y, x) not in blocked and all(x != q and abs(x - q) != y - row for row, q in enumerate(queens))
        )

    return place(0, [])


@problem("train", "hard", ([2, 4, 3, 1],), ([5],), ([],), ([2, 0, 2],), ([1, 2, 3, 4],), draw=lambda r: (_ints(r, 10, 0, 6),))
def largest_poster(fence: list[int]) -> int:
    """The boards of a fence have width 1 and the given heights. Return the area of the largest rectangular
    poster that fits on neighbouring boards without standing out. Constraints: 0 to 10000 boards of height 0
    or more."""
    best, stack = 0, []  # (first position, height), heights rising
    for i, height in enumerate([*fence, 0]):
        start = i
        while stack and stack[-1][1] >= height:
            start, h = stack.pop()
            best = max(best, h * (i - start))
        stack.append((start, height))
    return best


def _sum_text(r: random.Random, depth: int = 3) -> str:
    if depth == 0 or r.random() < 0.2:
        return str(r.randint(0, 20))
    inside = f"{_sum_text(r, depth - 1)}{r.choice(('+', '-', '*', ' - ', ' * '))}{_sum_text(r, depth - 1)}"
    return inside if r.random() < 0.5 else f"({inside})"


@problem("train", "hard", ("2 + 3*(4-1)",), ("7",), ("2-3-4",), ("-(2+3)",), ("2*-3",), draw=lambda r: (_sum_text(r),))
def pocket_calculator(text: str) -> int:
    """Work out a formula of integers, +, -, *, parentheses and spaces; * binds more tightly than + and -, and
    a minus may also stand before a number or a parenthesis. Do not use eval. Constraints: a valid formula
    of at most 500 characters."""
    import re

    tokens = re.findall(r"\d+|[-+*()]", text)

    def atom() -> int:
        token = tokens.pop(0)
        if token == "-":
            return -atom()
        if token != "(":
            return int(token)
        value = total()
        tokens.pop(0)  # the closing one
        return value

    def product() -> int:
        value = atom()
        while tokens and tokens[0] == "*":
            tokens.pop(0)
            value *= atom()
        return value

    def total() -> int:
        value = product()
        while tokens and tokens[0] in "+-":
            value += product() if tokens.pop(0) == "+" else -product()
        return value

    return total()


@problem("train", "hard", ("report7.txt", "re*?.txt"), ("abc", "a?"), ("", "*"), ("", "?"), ("aab", "*a?"),
         draw=lambda r: (_text(r, "ab", 6), _text(r, "ab?**", 5)))  # fmt: skip
def mask_fits(name: str, mask: str) -> bool:
    """In a mask, ? stands for exactly one character, * for any number of characters (also none), and anything
    else for itself. Say whether the mask fits the whole name. Constraints: at most 200 characters each."""
    fits = [True] + [False] * len(name)  # fits[i]: the mask so far fits the first i characters
    for m in mask:
        if m == "*":
            for i in range(len(name)):
                fits[i + 1] = fits[i + 1] or fits[i]
        else:
            fits = [False] + [fits[i] and m in ("?", c) for i, c in enumerate(name)]
    return fits[-1]


@problem("train", "hard", ("xaybbza", "ab"), ("abc", "cc"), ("a", "a"), ("", "a"), ("abcab", "bca"),
         draw=lambda r: (_text(r, "abcd", 14), _text(r, "abc", 3, 1)))  # fmt: skip
def smallest_cover(text: str, needed: str) -> str:
    """Return the shortest stretch of neighbouring characters of the text that has every character of `needed`
    at least as often as `needed` has it; of equally short ones the first; "" if there is none. Constraints:
    text has at most 10000 characters, needed 1 to 100."""
    from collections import Counter

    missing, open_, start, best = Counter(needed), len(needed), 0, ""
    for end, c in enumerate(text, 1):
        open_ -= missing[c] > 0
        missing[c] -= 1
        while open_ == 0:
            if not best or end - start < len(best):
                best = text[start:end]
            missing[text[start]] += 1
            open_ += missing[text[start]] > 0
            start += 1
    return best


def _rules(r: random.Random) -> tuple:
    n = r.randint(2, 7)
    names = r.sample(range(n), n)
    rules = [[names[a], names[b]] for a, b in _edges(r, n, 0.3)]
    return n, rules + ([rules[0][::-1]] if rules and r.random() < 0.3 else [])


@problem("train", "hard", (4, [[3, 0], [2, 1]]), (2, [[0, 1], [1, 0]]), (1, []), (3, [[2, 0]]), draw=_rules)
def dressing_order(n: int, rules: list[list[int]]) -> list[int]:
    """Clothes have the numbers 0 to n-1; a rule [a, b] says that a must be put on before b. Return the order
    that obeys all rules and is smallest when orders are compared like words, or [] if there is none.
    Constraints: 1 <= n <= 1000, at most 5000 rules."""
    import heapq

    before = [0] * n
    for _, b in rules:
        before[b] += 1
    ready, order = [i for i in range(n) if not before[i]], []
    while ready:
        a = heapq.heappop(ready)
        order.append(a)
        for x, b in rules:
            if x == a:
                before[b] -= 1
                if not before[b]:
                    heapq.heappush(ready, b)
    return order if len(order) == n else []


@problem("train", "hard", ([3, 1, 5],), ([2],), ([],), ([1, 0, 4],), draw=lambda r: (_ints(r, 6, 0, 6),))
def popped_points(balloons: list[int]) -> int:
    """Balloons with numbers hang in a row. Popping one earns its number times the numbers of its present left
    and right neighbours (a missing neighbour counts 1); then the gap closes. Return the most points that
    popping all of them can earn. Constraints: 0 to 100 balloons, numbers of 0 or more."""
    row = [1, *balloons, 1]
    n = len(row)
    best = [[0] * n for _ in range(n)]  # between i and j, both still there
    for width in range(2, n):
        for i in range(n - width):
            j = i + width
            best[i][j] = max(best[i][k] + best[k][j] + row[i] * row[k] * row[j] for k in range(i + 1, j))
    return best[0][-1]


@problem("train", "hard", ([4, 1, 3, 5, 2], 3), ([7, 6], 1), ([1, 2], 2), ([], 2), ([3], 2),
         draw=lambda r: (_ints(r, 12), r.randint(1, 4)))  # fmt: skip
def peaks_seen(heights: list[int], window: int) -> list[int]:
    """Through a window one sees `window` neighbouring heights; it moves from left to right one place at a
    time. Return the highest of them at each place, [] if the list is shorter than the window. Aim at O(n).
    Constraints: 0 to 10000 heights, window >= 1."""
    from collections import deque

    queue, peaks = deque(), []  # positions with falling heights
    for i, h in enumerate(heights):
        while queue and heights[queue[-1]] <= h:
            queue.pop()
        queue.append(i)
        if queue[0] <= i - window:
            queue.popleft()
        if i >= window - 1:
            peaks.append(heights[queue[0]])
    return peaks


def _roads(r: random.Random) -> tuple:
    n = r.randint(2, 6)
    return n, [[a, b, r.randint(1, 9)] for a, b in _edges(r, n, 0.5)], r.randint(0, 1)


@problem("train", "hard", (3, [[0, 1, 4], [1, 2, 5], [0, 2, 8]], 1), (3, [[0, 2, 8], [0, 1, 1], [1, 2, 5]], 0), (2, [], 1),
         (1, [], 0), (3, [[0, 1, 4], [1, 2, 5]], 1), draw=_roads)  # fmt: skip
def trip_with_tickets(n: int, roads: list[list[int]], tickets: int) -> int:
    """Towns have the numbers 0 to n-1; a road [a, b, toll] can be used in both directions. Each ticket lets
    one use one road without its toll. Return the smallest sum of tolls from town 0 to town n-1, or -1 if
    there is no way. Constraints: 1 <= n <= 200, at most 1000 roads, tolls of 0 or more, 0 to 3 tickets."""
    import heapq

    queue, done = [(0, 0, tickets)], set()
    while queue:
        cost, town, left = heapq.heappop(queue)
        if town == n - 1:
            return cost
        if (town, left) in done:
            continue
        done.add((town, left))
        for a, b, toll in roads:
            if town in (a, b):
                heapq.heappush(queue, (cost + toll, a + b - town, left))
                if left:
                    heapq.heappush(queue, (cost, a + b - town, left - 1))
    return -1


# ------------------------------------------------------------------------------------------------------
# test, easy
# ------------------------------------------------------------------------------------------------------


@problem("test", "easy", ([5, 2, 4],), ([1, 1],), ([],), draw=lambda r: (_ints(r),))
def zigzag_sum(xs: list[int]) -> int:
    """Return the first number minus the second plus the third minus the fourth and so on; 0 for an empty
    list. Constraints: 0 to 1000 integers."""
    return sum(xs[::2]) - sum(xs[1::2])


@problem("test", "easy", ([3, 1, 4],), ([1, 2],), ([],), ([2],), draw=lambda r: (r.sample(range(1, 9), 8)[:-1],))
def absent_ticket(tickets: list[int]) -> int:
    """The tickets 1 to n+1 were printed and all but one came back: a list of n different numbers in any
    order. Return the missing one. Constraints: 0 <= n <= 1000."""
    return sum(range(len(tickets) + 2)) - sum(tickets)


@problem("test", "easy", ("Zoo, 7!", 1), ("abc", -1), ("", 5), ("xyz", 29), ("Hello", 0),
         draw=lambda r: (_text(r, "aMz Z.", 8), r.randint(-30, 30)))  # fmt: skip
def shift_letters(text: str, k: int) -> str:
    """Replace every letter by the one k places later in the alphabet, going on at a after z; case stays, other
    characters too. A negative k goes back. Constraints: at most 1000 ASCII characters."""
    moved = []
    for c in text:
        first = ord("a") if "a" <= c <= "z" else ord("A") if "A" <= c <= "Z" else None
        moved.append(c if first is None else chr((ord(c) - first + k) % 26 + first))
    return "".join(moved)


@problem("test", "easy", ([[1, 2, 3], [4, 5, 6]],), ([[7]],), ([[1], [2]],), draw=lambda r: (_grid(r, 0, 9),))
def rows_to_columns(table: list[list[int]]) -> list[list[int]]:
    """Return a table whose rows are the columns of the given one. Constraints: a rectangular table of 1 to 50
    rows and columns."""
    return [list(column) for column in zip(*table, strict=True)]


@problem("test", "easy", ("banana",), ("cab",), ("z",), ("bbaa",), draw=lambda r: (_text(r, "abcd", 9, 1),))
def commonest_letter(word: str) -> str:
    """Return the letter that occurs most often in a word; of equally frequent ones the first in the alphabet.
    Constraints: 1 to 1000 lower-case letters."""
    return min(word, key=lambda c: (-word.count(c), c))


@problem("test", "easy", ("lemon", "monle"), ("lemon", "melon"), ("", ""), ("a", "aa"), ("ab", "ab"),
         draw=lambda r: ((t := _text(r, "aab", 7, 4)), r.choice((t[2:] + t[:2], t[1:] + "b", "b" + t[1:]))))  # fmt: skip
def same_necklace(a: str, b: str) -> bool:
    """Beads hang on a closed string and are written down as a text from any bead on, always in the same
    direction. Say whether a and b can be the same necklace. Constraints: at most 1000 letters each."""
    return len(a) == len(b) and b in a + a


@problem("test", "easy", ([3, 1, 3, 8], [8, 3, 9]), ([1], [2]), ([], []), ([2, 2], [2, 2]),
         draw=lambda r: (_ints(r, 8, 0, 9), _ints(r, 8, 0, 9)))  # fmt: skip
def mutual_friends(a: list[int], b: list[int]) -> list[int]:
    """Return the numbers that are in both lists, each once, in ascending order. Constraints: 0 to 1000
    integers each."""
    return sorted(set(a) & set(b))


@problem(
    "test",
    "easy",
    ("XIV",),
    ("MCMXC",),
    ("I",),
    ("MMMCMXCIX",),
    draw=lambda r: ("".join(r.choice(p.split()) for p in ("M MM MMM", "CD CC CM", "XL XC LX", "IX V IV")),),
)
def read_roman(text: str) -> int:
    """Return the number that a Roman numeral stands for: I 1, V 5, X 10, L 50, C 100, D 500, M 1000; a letter
    before a greater one is subtracted. Constraints: a valid numeral from 1 to 3999."""
    values = [dict(I=1, V=5, X=10, L=50, C=100, D=500, M=1000)[c] for c in text]
    return sum(-v if v < max(values[i + 1 : i + 2], default=0) else v for i, v in enumerate(values))


# ------------------------------------------------------------------------------------------------------
# test, medium
# ------------------------------------------------------------------------------------------------------


@problem("test", "medium", ([[2, 3], [5, 7]], 1, 9), ([[0, 5]], 2, 4), ([], 1, 2), ([[3, 4], [1, 3], [8, 12]], 0, 10),
         draw=lambda r: (_spans(r, 4), r.randint(0, 5), r.randint(8, 22)))  # fmt: skip
def free_times(busy: list[list[int]], start: int, end: int) -> list[list[int]]:
    """A hall is busy from a to b for each [a, b] with a < b; these times may overlap and come in any order.
    Return all the free times [a, b], a < b, between start and end, in ascending order and as long as
    possible. Constraints: 0 to 1000 busy times, start < end."""
    free = []
    for a, b in sorted(busy):
        if start < min(a, end):
            free.append([start, min(a, end)])
        start = max(start, b)
    return free + ([[start, end]] if start < end else [])


@problem("test", "medium", ([2, -5, 4, -1, 3],), ([-3, -2],), ([7],), draw=lambda r: (_ints(r, 10, least=1),))
def best_season(gains: list[int]) -> int:
    """Return the largest sum of one or more neighbouring entries. Constraints: 1 to 10000 integers."""
    best = here = gains[0]
    for gain in gains[1:]:
        here = max(here, 0) + gain
        best = max(best, here)
    return best


@problem("test", "medium", ([3, 2, 5, 10],), ([4, 1, 1],), ([],), ([5],), ([1, 9, 1, 9],), draw=lambda r: (_ints(r, 9, 0, 9),))
def pick_on_a_ring(plants: list[int]) -> int:
    """Plants with the given numbers of berries stand in a ring, so that the last is next to the first. Of two
    neighbours at most one may be picked. Return the most berries that one can get. Constraints: 0 to 1000
    plants, numbers of 0 or more."""

    def in_a_row(row: list[int]) -> int:
        taken = skipped = 0
        for berries in row:
            taken, skipped = skipped + berries, max(taken, skipped)
        return max(taken, skipped)

    return max(plants) if 0 < len(plants) < 3 else max(in_a_row(plants[1:]), in_a_row(plants[:-1]))


@problem("test", "medium", ([[1, 2], [3, 4]], 1), ([[1, 2, 3]], 2), ([[5]], 7), ([[1, 2], [3, 4]], -1),
         draw=lambda r: (_grid(r, 0, 9, 4), r.randint(-5, 9)))  # fmt: skip
def turn_photo(pixels: list[list[int]], quarters: int) -> list[list[int]]:
    """Turn a rectangular picture by the given number of quarter turns clockwise (negative: the other way).
    Constraints: 1 to 50 rows and columns, -100 <= quarters <= 100."""
    pixels = [list(row) for row in pixels]
    for _ in range(quarters % 4):
        pixels = [list(row) for row in zip(*pixels[::-1], strict=True)]
    return pixels


@problem("test", "medium", ("/home/./music/../notes",), ("/../a//b/",), ("/",), ("/...",), ("/a/b/../../..",),
         draw=lambda r: ("/" + "/".join(r.choices(["a", "b", ".", "..", "", "c.d"], k=r.randint(1, 7))),))  # fmt: skip
def tidy_path(path: str) -> str:
    """In an absolute path the parts are separated by one or more slashes; "." means the same folder, ".." the
    one above (at the root: the root itself). Return the shortest form of the path: one slash before each
    part, none at the end, "/" for the root. Constraints: starts with a slash, at most 1000 characters."""
    kept: list[str] = []
    for part in path.split("/"):
        if part == "..":
            kept = kept[:-1]
        elif part not in ("", "."):
            kept.append(part)
    return "/" + "/".join(kept)


@problem("test", "medium", ([4, 1, 3, 2, 5],), ([3, 3, 3],), ([],), ([5, 4],), draw=lambda r: (_ints(r, 10),))
def growing_choice(heights: list[int]) -> int:
    """Leave out some people of a row (or none) so that the heights of the others rise strictly from left to
    right. Return how many can stay at most. Aim at O(n log n). Constraints: 0 to 10000 people."""
    from bisect import bisect_left

    lowest: list[int] = []  # the lowest end of a rising choice of each length
    for h in heights:
        i = bisect_left(lowest, h)
        lowest[i : i + 1] = [h]
    return len(lowest)


@problem("test", "medium", ([-1, 0, 1, 2, -1],), ([1, 2],), ([0, 0, 0, 0],), ([],), draw=lambda r: (_ints(r, 9, -5, 5),))
def balanced_trios(weights: list[int]) -> list[list[int]]:
    """Choose three entries at different positions with sum 0. Return all different such trios, each in
    ascending order, the list in ascending order too. Constraints: 0 to 300 integers."""
    weights, trios = sorted(weights), []
    for i, a in enumerate(weights):
        low, high = i + 1, len(weights) - 1
        while low < high:
            total = a + weights[low] + weights[high]
            trio = [a, weights[low], weights[high]]
            if total == 0 and trio not in trios:
                trios.append(trio)
            low, high = (low, high - 1) if total > 0 else (low + 1, high)
    return trios


@problem(
    "test",
    "medium",
    (["..#", "...", "#.."],),
    (["#."],),
    (["."],),
    (["..", "##", ".."],),
    draw=lambda r: ([".." * (n := r.randint(1, 3)), *("".join(r.choices("..#", k=2 * n)) for _ in range(3)), ".." * n],),
)
def way_through_maze(maze: list[str]) -> int:
    """In a rectangular maze . is free and # is a wall; a step goes to a free cell that shares a side. Return
    the smallest number of steps from the top left to the bottom right, or -1 if there is no way or one of
    the two is a wall. Constraints: 1 to 50 rows and columns."""
    free = {(y, x) for y, row in enumerate(maze) for x, cell in enumerate(row) if cell == "."}
    goal = (len(maze) - 1, len(maze[0]) - 1)
    edge, steps = {(0, 0)} & free, 0
    while edge:
        if goal in edge:
            return steps
        free -= edge
        edge = {near for y, x in edge for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1))} & free
        steps += 1
    return -1


@problem(
    "test",
    "medium",
    (["1.2", "1.10", "1.2.0"],),
    (["2", "1.9"],),
    ([],),
    (["1.0.1", "1"],),
    draw=lambda r: ([".".join(str(r.randint(0, 11)) for _ in range(r.randint(1, 3))) for _ in range(r.randint(1, 5))],),
)
def newest_release(versions: list[str]) -> str:
    """Versions are numbers separated by dots and are compared number by number from the left; a missing
    number counts as 0. Return the newest version; of equal ones the first in the list; "" if the list is
    empty. Constraints: 0 to 100 versions of at most 6 numbers, without leading zeros."""
    return max(versions, key=lambda v: [*map(int, v.split("."))] + [0] * (6 - len(v.split("."))), default="")


# ------------------------------------------------------------------------------------------------------
# test, hard
# ------------------------------------------------------------------------------------------------------


@problem("test", "hard", ("banana", "ana"), ("abc", "d"), ("aaa", "a"), ("", ""), ("ab", ""), ("", "a"),
         draw=lambda r: (_text(r, "ab", 9), _text(r, "ab", 3, 1)))  # fmt: skip
def ways_to_leave(text: str, word: str) -> int:
    """Count the ways to cross out characters of a text so that exactly the word is left; ways are different if
    they cross out different positions. Constraints: at most 200 characters each."""
    ways = [1] + [0] * len(word)  # ways[j]: to leave the first j letters of the word
    for c in text:
        for j in range(len(word), 0, -1):
            if word[j - 1] == c:
                ways[j] += ways[j - 1]
    return ways[-1]


def _blocks(r: random.Random) -> tuple:
    return ([[*sorted(r.sample(range(12), 2)), r.randint(1, 6)] for _ in range(r.randint(1, 6))],)


@problem("test", "hard", ([[1, 4, 3], [2, 6, 2]],), ([[1, 2, 5], [2, 3, 5]],), ([],), ([[1, 5, 2], [2, 3, 4]],), draw=_blocks)
def outline(houses: list[list[int]]) -> list[list[int]]:
    """A house [a, b, h] covers the street from a to b, a < b, up to height h > 0. Seen from afar the houses
    make one outline. Return it as the points [x, height] where its height changes, from left to right, with
    the height just right of x (0 if there is no house). Constraints: 0 to 1000 houses in any order."""
    points: list[list[int]] = []
    for x in sorted({x for a, b, _ in houses for x in (a, b)}):
        height = max((h for a, b, h in houses if a <= x < b), default=0)
        if height != (points[-1][1] if points else 0):
            points.append([x, height])
    return points


@problem("test", "hard", (["to", "be", "or", "not", "to"], 8), (["a"], 3), (["ab", "c"], 4), ([], 5), (["abc", "de"], 3),
         draw=lambda r: ([_text(r, "abc", 5, 1) for _ in range(r.randint(1, 8))], r.randint(5, 12)))  # fmt: skip
def set_lines(words: list[str], width: int) -> list[str]:
    """Set words in lines of exactly `width` characters: as many words a line as fit with one space between
    them. In all lines but the last the spaces are spread evenly between the words, the left gaps getting
    one more where it does not come out even; a single word is followed by spaces. The last line has single
    spaces and is filled up at its end. Constraints: 0 to 300 words, none longer than the width."""
    lines: list[list[str]] = []
    for word in words:
        if lines and len(" ".join([*lines[-1], word])) <= width:
            lines[-1].append(word)
        else:
            lines.append([word])
    result = []
    for i, line in enumerate(lines):
        if i < len(lines) - 1 and len(line) > 1:
            each, more = divmod(width - sum(map(len, line)), len(line) - 1)
            line = [word + " " * (each + (j < more)) for j, word in enumerate(line[:-1])] + line[-1:]
            result.append("".join(line))
        else:
            result.append(" ".join(line).ljust(width))
    return result


@problem(
    "test",
    "hard",
    ("aab", "c*a*b"),
    ("abc", "a.d"),
    ("", "a*"),
    ("ab", ".*"),
    ("aaa", "a*a"),
    ("", ""),
    draw=lambda r: (_text(r, "ab", 5), "".join(r.choice("ab.") + r.choice(("", "*")) for _ in range(r.randint(1, 4)))),
)
def pattern_covers(text: str, pattern: str) -> bool:
    """In a pattern . stands for any one character, every other one for itself, and a * behind one of them for
    any number of it (also none). Say whether the pattern covers the whole text. Do not use re. Constraints:
    at most 50 characters each; no * at the start or after another."""
    from functools import cache

    @cache
    def covers(i: int, j: int) -> bool:
        if j == len(pattern):
            return i == len(text)
        first = i < len(text) and pattern[j] in (".", text[i])
        if pattern[j + 1 : j + 2] == "*":
            return covers(i, j + 2) or (first and covers(i + 1, j))
        return first and covers(i + 1, j + 1)

    return covers(0, 0)


@problem("test", "hard", ("aabca",), ("noon",), ("a",), ("abc",), ("aabb",), draw=lambda r: (_text(r, "ab", 10, 1),))
def fewest_mirror_pieces(text: str) -> int:
    """Cut a text into pieces each of which reads the same forwards and backwards. Return the smallest number of
    pieces. Constraints: 1 to 500 characters."""
    fewest = [0] + [len(text)] * len(text)
    for end in range(1, len(text) + 1):
        for start in range(end):
            piece = text[start:end]
            if piece == piece[::-1]:
                fewest[end] = min(fewest[end], fewest[start] + 1)
    return fewest[-1]


@problem("test", "hard", ([[1, 2], [4, 3]],), ([[5]],), ([[7, 7], [7, 7]],), draw=lambda r: (_grid(r, 0, 9, 4),))
def longest_climb(heights: list[list[int]]) -> int:
    """On a rectangular map one may step to a cell that shares a side and is strictly higher. Return the number
    of cells of the longest such climb, its first cell included. Constraints: 1 to 30 rows and columns."""
    from functools import cache

    cells = {(y, x): h for y, row in enumerate(heights) for x, h in enumerate(row)}

    @cache
    def climb(y: int, x: int) -> int:
        near = ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1))
        return 1 + max((climb(*c) for c in near if cells.get(c, -1) > cells[y, x]), default=0)

    return max(climb(*c) for c in cells)


@problem("test", "hard", (4, [[0, 1], [1, 2], [2, 0], [2, 3]]), (2, [[0, 1]]), (3, []), (3, [[0, 1], [1, 2], [0, 2]]),
         draw=lambda r: ((n := r.randint(3, 7)), _edges(r, n, 0.4)))  # fmt: skip
def weak_cables(n: int, cables: list[list[int]]) -> list[list[int]]:
    """Computers 0 to n-1 are joined by cables [a, b] with a < b, no pair twice. A cable is weak if without it
    some two computers that were connected no longer are. Return the weak cables in ascending order.
    Constraints: 1 <= n <= 100, at most 500 cables."""

    def connected(a: int, b: int, without: list[int]) -> bool:
        reached, edge = {a}, [a]
        while edge:
            here = edge.pop()
            near = {x + y - here for x, y in cables if here in (x, y) and [x, y] != without} - reached
            reached |= near
            edge += near
        return b in reached

    return sorted([a, b] for a, b in cables if not connected(a, b, [a, b]))


@problem("test", "hard", ([3, 1, 5, 2, 6], 1), ([3, 1, 5, 2, 6], 2), ([], 2), ([5, 4], 3), ([1, 2], 0),
         draw=lambda r: (_ints(r, 8, 0, 9), r.randint(0, 3)))  # fmt: skip
def best_trades(prices: list[int], trades: int) -> int:
    """A trade buys one thing on one day and sells it on a later one; the next trade may start on the day of the
    sale at the earliest. Return the largest gain that at most `trades` trades can make. Constraints: 0 to
    1000 prices, 0 <= trades <= 100."""
    cash, owned = [0] * (trades + 1), [float("-inf")] * (trades + 1)  # by the number of trades begun
    for price in prices:
        for t in range(1, trades + 1):
            cash[t] = max(cash[t], owned[t] + price)
            owned[t] = max(owned[t], cash[t - 1] - price)
    return max(cash)


@problem("test", "hard", ([7, 2, 5, 10, 8], 2), ([1, 2, 3], 1), ([4, 4], 2), ([9, 1, 1, 1], 3),
         draw=lambda r: (_ints(r, 8, 0, 12, 3), r.randint(1, 3)))  # fmt: skip
def lightest_loads(parcels: list[int], vans: int) -> int:
    """Parcels in a row are loaded into vans in this order: the first van takes the first ones, the next van the
    following ones and so on; every van takes at least one. Return the weight of the heaviest load if it is
    made as small as possible. Constraints: 1 <= vans <= number of parcels <= 1000, weights of 0 or more."""
    low, high = max(parcels), sum(parcels)
    while low < high:
        limit = (low + high) // 2
        used, load = 1, 0
        for weight in parcels:
            if load + weight > limit:
                used, load = used + 1, 0
            load += weight
        low, high = (low, limit) if used <= vans else (limit + 1, high)
    return low
