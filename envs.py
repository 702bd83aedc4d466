"""The worlds: small text environments in which a language-model agent acts.  (stdlib only)

A world is played in the manner of Gymnasium:

    env = make_env("house")
    observation, info = env.reset(task)
    observation, reward, terminated, truncated, info = env.step("go fridge")

The reward is 1 on success, else 0, and is given once, at the end of the episode (SGE 3.1: one sparse
outcome reward).  `info["outcome"]` is a hashable key of what the episode did, for counting distinct
outcomes; `info["feedback"]` is a sentence about what went wrong, for strategy reflection.  Any string
is a legal argument of `step`: what is no valid action changes nothing, says what was wrong, and costs
a step.  Everything is deterministic given the task.

Four worlds, one for each domain of the paper (SGE 4.1), all text, all small:

  house  after LangR: find things and carry them about         fourteen places, 24 objects
  phone  after AndroidWorld: tap on a grid of cells            five apps, fifteen screens
  apps   after AppWorld: one API call a step                   twelve apps, 55 APIs
  code   after LeetCodeDataset: write a function               hidden tests, two attempts

Every world has three tiers of tasks.  *Hard* tasks are easy to carry out and hard to think of: the usual
means never work, ONE particular odd one does.  Which one depends on what the task is about, by a rule that
is the same in all hard tasks of the world and that nobody tells the agent - it can be learnt, and holds in
the test tasks.  A word in the instruction tells that a task is of that kind: a *messy* house, a *Beta*
phone, an *old* account, a *legacy* function.

Each world also has a *scripted behaviour* (`HouseScript`, ...), from which the tiny base model learns to
speak (policy.py).  It sees only what the agent sees.  It carries out any strategy correctly but has firm beliefs
about what is usual, in all tiers the same; it stands in for a pretrained model, which likewise can do a lot more
than it thinks of.  (If the few odd choices it makes came in hard tasks alone, nothing in the other tiers would speak
against them, and GRPO, too, would drift into the hard tier.)

Try it:  python envs.py --env phone              play a task by hand
         python envs.py --env house --tier hard  ... a hard one
"""

import argparse
import copy
import functools
import inspect
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import problems
import sandbox

TIERS = ("easy", "medium", "hard")
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Task:
    """One task of a world.  `spec` holds the start state and the goal; the agent sees only `instruction`
    and what `Env.reset` shows.  Tasks are equal when their ids are."""

    id: str  # e.g. "house/train/hard/017"
    split: str  # "train" | "test"; warm-start practice has "practice"
    tier: str  # "easy" | "medium" | "hard"
    family: str  # the kind of instruction, e.g. "bring"
    instruction: str
    spec: dict = field(compare=False, hash=False, repr=False)


def draw_tasks(world: str, counts: dict, make: Callable, asked: Callable) -> dict[tuple[str, str], list[Task]]:
    """The tasks of a world by (split, tier): drawn until each family has as many as `counts`[split][tier] says.

    make(rng, task id, split, tier, family) draws a task; asked(task) is what it asks for, and no two tasks ask for
    the same; None: the task makes no sense.  Train comes first, so test avoids it.  Raises ValueError if a family has
    too few different tasks.
    """
    seen, drawn = {None}, {}
    for split in SPLITS:
        for tier in TIERS:
            rng = random.Random(f"{world}/{split}/{tier}")  # a string seed: the same under every PYTHONHASHSEED
            found = drawn[split, tier] = []
            for family, count in counts[split][tier].items():
                draws = 1000 * count
                while count:
                    if not draws:
                        lack = f"not enough different {family!r} tasks for {split}/{tier}: {count} are missing"
                        raise ValueError(f"{world} has {lack}")
                    draws -= 1
                    task = make(rng, f"{world}/{split}/{tier}/{len(found):03d}", split, tier, family)
                    if asked(task) not in seen:
                        seen.add(asked(task))
                        found.append(task)
                        count -= 1
    return drawn


def draw_practice(rng: random.Random, counts: dict, make: Callable, asked: Callable) -> Task:
    """A task for the warm start, of a family of the training split; `make` and `asked` as in `draw_tasks`, with
    "practice" for the id and the split.  In hard ones anything may be the means that works: the rule cannot leak."""
    tier = rng.choices(TIERS, (4, 2, 3))[0]
    families = counts["train"][tier]
    while True:
        family = rng.choices(list(families), list(families.values()))[0]
        task = make(rng, "practice", "practice", tier, family)
        if asked(task) is not None:
            return task


# ------------------------------------------------------------------------------------------------------
# house
# ------------------------------------------------------------------------------------------------------
#
# After LangR (LLaRP).  How it differs:
#   1. Fourteen receptacles and 24 objects instead of 16 and 28; 6 to 14 steps instead of 32.
#   2. Every task comes from a seeded generator; the original's scenes and data set are not needed.
#   3. Houses are *tidy* or *messy*, and the text says which.  In a tidy house things are where people
#      keep them.  In a messy one every category is in ONE particular odd place.

OPEN_PLACES = ("counter", "sink", "table", "sofa", "desk", "bed", "shelf", "rug", "bench", "stool")
CLOSED_PLACES = ("fridge", "cabinet", "drawer", "chest")  # must be opened before one sees or takes anything
PLACES = OPEN_PLACES + CLOSED_PLACES

# category -> (objects, the three usual places from most to least usual, the odd place of messy houses).  The odd
# places are usual for nothing: the agent must not find them by mistaking one category for another.
CATEGORIES = {
    "fruit": (("apple", "pear", "lemon", "plum", "peach", "banana"), ("counter", "fridge", "table"), "shelf"),
    "dish": (("plate", "bowl", "cup", "spoon", "fork", "mug"), ("cabinet", "sink", "counter"), "rug"),
    "tool": (("hammer", "wrench", "drill", "saw", "clamp", "pliers"), ("chest", "drawer", "desk"), "stool"),
    "toy": (("ball", "lego", "cube", "doll", "kite", "robot"), ("bed", "sofa", "chest"), "bench"),
}
OBJECTS = tuple(o for objects, _, _ in CATEGORIES.values() for o in objects)
CATEGORY_OF = {o: c for c, (objects, _, _) in CATEGORIES.items() for o in objects}

USUAL = (0.75, 0.2, 0.05)  # how often things of a tidy house are in the three usual places - and the script's beliefs
ODD = 0.006  # the share of the script's searches that go anywhere else

# A layout is the set of places that a house has; each has all the odd places and two or more of the usual ones of
# every category.  The last one is for test tasks only.
LAYOUTS = {
    "train": (
        ("counter", "rug", "fridge", "cabinet", "bench", "chest", "stool", "drawer", "bed", "shelf"),
        ("table", "counter", "shelf", "cabinet", "stool", "chest", "desk", "bench", "sofa", "rug"),
        ("bench", "desk", "fridge", "table", "sink", "rug", "shelf", "drawer", "cabinet", "stool", "bed", "sofa"),
        ("shelf", "counter", "stool", "sink", "table", "bed", "drawer", "rug", "chest", "bench"),
    ),
    "test": (("desk", "bench", "bed", "chest", "rug", "cabinet", "fridge", "shelf", "counter", "stool"),),
}

# The kinds of instruction and the tiers that use them, with how many tasks of each a split holds.
FAMILY_COUNTS = {
    "train": {
        "easy": {"bring": 46, "find": 12, "from": 2, "open": 2, "close": 2},
        "medium": {"stow": 48, "two": 8, "swap": 8},
        "hard": {"bring": 84, "find": 12},
    },
    "test": {  # "clear" (take it off there) is an instruction that training never shows
        "easy": {"bring": 26, "find": 8, "from": 1, "open": 1, "close": 1, "clear": 3},
        "medium": {"stow": 28, "two": 4, "swap": 4, "clear": 4},
        "hard": {"bring": 32, "find": 8},
    },
}


class House:
    """A house with things in it.  Actions: go PLACE, open PLACE, close PLACE, pick OBJECT, place OBJECT.

    The agent sees what it holds and what is at the place where it stands; inside a closed place it sees
    nothing.  The episode ends with success as soon as the goal holds, or without it at the step limit.
    """

    ACTIONS = ("go", "open", "close", "pick", "place")
    over = True  # until the first reset

    def reset(self, task: Task) -> tuple[str, dict]:
        """Start `task` from its initial state.  Returns (observation, info)."""
        spec = task.spec
        self.task, self.steps, self.over = task, 0, False
        self.where = dict(spec["objects"])  # object -> place, or "hand"
        self.opened = set(spec["opened"])
        self.at, self.visited = "door", set()
        return self._look(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Carry out one action given as text.  Returns (observation, reward, terminated, truncated, info)."""
        if self.over:
            raise RuntimeError("no episode is running: call reset() before step()")
        self.steps += 1
        wrong = self._act(action)
        success = all(self._holds(goal) for goal in self.task.spec["goals"])
        truncated = not success and self.steps >= self.task.spec["limit"]
        self.over = success or truncated
        observation = f"Not possible: {wrong}. {self._look()}" if wrong else self._look()
        return observation, float(success), success, truncated, self._info()

    # -- what an action does ---------------------------------------------------------------------------

    def _act(self, action: str) -> str:
        """Change the state; return "" or what was wrong (then nothing changed)."""
        # case, spacing, articles, quotes around it and a final full stop do not matter
        words = [w for w in action.lower().strip(" \t\r\n.\"'`").split() if w not in ("the", "a", "an", "to")]
        if len(words) != 2 or words[0] not in self.ACTIONS:
            return "an action is one of go, open, close, pick, place and one name"
        verb, name = words
        if verb in ("pick", "place"):
            return self._move_object(verb, name)
        if name not in self.task.spec["places"]:
            return "there is no such place here"
        if verb == "go":
            self.at = name
            self.visited.add(name)
            return ""
        if name != self.at:
            return f"you are not at the {name}"
        if name not in CLOSED_PLACES:
            return f"the {name} has no door"
        if (verb == "open") == (name in self.opened):
            return f"the {name} is {'open' if verb == 'open' else 'closed'} already"
        (self.opened.add if verb == "open" else self.opened.discard)(name)
        return ""

    def _move_object(self, verb: str, name: str) -> str:
        if name not in OBJECTS:
            return "there is no such thing"
        if verb == "pick":
            if self._held():
                return "your hand is full"
            if name not in self._visible():
                return f"you see no {name} here"
            self.where[name] = "hand"
            return ""
        if self.where.get(name) != "hand":
            return f"you do not hold the {name}"
        if self.at == "door":
            return "there is nothing to place it on"
        if self._shut():
            return f"the {self.at} is closed"
        self.where[name] = self.at
        return ""

    def _holds(self, goal: tuple) -> bool:
        """One goal predicate: on(object, place), off(object, place), held(object), opened/closed(place)."""
        kind, name = goal[0], goal[1]
        if kind == "on":
            return self.where[name] == goal[2]
        if kind == "off":  # put down somewhere else
            return self.where[name] not in (goal[2], "hand")
        if kind == "held":
            return self.where[name] == "hand"
        return (name in self.opened) == (kind == "opened")

    # -- what the agent is told ------------------------------------------------------------------------

    def _held(self) -> str:
        return next((o for o, place in self.where.items() if place == "hand"), "")

    def _shut(self) -> bool:
        return self.at in CLOSED_PLACES and self.at not in self.opened

    def _visible(self) -> list[str]:
        return [] if self._shut() else sorted(o for o, place in self.where.items() if place == self.at)

    def _look(self) -> str:
        here = "closed" if self._shut() else ", ".join(self._visible()) or "nothing"
        at = "At the door." if self.at == "door" else f"At the {self.at}: {here}."
        return f"{at} Holding {self._held() or 'nothing'}."

    def _info(self) -> dict:
        targets = self.task.spec["targets"]
        missing = [o for o in targets if self.where[o] == self.task.spec["objects"][o]]
        feedback = f"The {missing[0]} never moved." if missing else "The goal was not reached."
        # Two episodes are the same outcome when they searched the same places and left the goal's
        # objects in the same ones.
        outcome = (tuple(sorted(self.visited)), tuple(self.where[o] for o in targets))
        return {"outcome": outcome, "feedback": feedback, "steps": self.steps}


# -- its tasks -----------------------------------------------------------------------------------------


def _house_task(rng: random.Random, task_id: str, split: str, tier: str, family: str, placing: str) -> Task:
    """Draw one house, things in it and an instruction.

    placing: "tidy" (usual places), "messy" (the odd place of each category) or "anywhere" (practice for
    the warm start: nothing can be learnt from where things are).
    """
    messy = tier == "hard"
    layout = LAYOUTS["test" if split == "test" else "train"]
    places = rng.choice(layout)

    def put(thing: str) -> str:
        _, usual, odd = CATEGORIES[CATEGORY_OF[thing]]
        if placing == "messy":
            return odd
        if placing == "anywhere":
            return rng.choice(places)
        share = {p: s for p, s in zip(usual, USUAL, strict=True) if p in places}
        return rng.choices(list(share), list(share.values()))[0]

    things = rng.sample(OBJECTS, 8)  # two of them are the targets, the others just lie about
    objects = {thing: put(thing) for thing in things}
    a, b = things[:2]
    open_places = [p for p in places if p in OPEN_PLACES]
    to = rng.choice([p for p in open_places if p not in (objects[a], objects[b])])
    door = rng.choice([p for p in places if p in CLOSED_PLACES])
    opened: tuple = ()
    told = {}  # object -> the place that the instruction names as its source

    def search(thing: str) -> int:
        """Steps that suffice to look into every usual place of `thing`, or to get it where told."""
        looked = [told[thing]] if thing in told else [p for p in CATEGORIES[CATEGORY_OF[thing]][1] if p in places]
        return sum(2 if p in CLOSED_PLACES else 1 for p in looked)

    if family == "bring":
        text, goals, targets = f"bring the {a} to the {to}", [("on", a, to)], [a]
        limit = search(a) + 3
    elif family == "stow":  # into something that has to be opened first
        to = rng.choice([p for p in places if p in CLOSED_PLACES and p != objects[a]])
        text, goals, targets = f"put the {a} into the {to}", [("on", a, to)], [a]
        limit = search(a) + 4
    elif family == "find":
        text, goals, targets = f"find the {a}", [("held", a)], [a]
        limit = search(a) + 1
    elif family in ("from", "clear"):
        told = {a: objects[a]}
        if family == "from":
            text, goals, targets = f"bring the {a} from the {told[a]} to the {to}", [("on", a, to)], [a]
        else:
            text, goals, targets = f"take the {a} off the {told[a]}", [("off", a, told[a])], [a]
        limit = search(a) + 3
    elif family in ("open", "close"):
        text, goals, targets = f"{family} the {door}", [("opened" if family == "open" else "closed", door)], []
        opened = () if family == "open" else (door,)
        limit = 3
    elif family == "two":
        told = {a: objects[a], b: objects[b]}
        text = f"bring the {a} from the {told[a]} and the {b} from the {told[b]} to the {to}"
        goals, targets = [("on", a, to), ("on", b, to)], [a, b]
        limit = search(a) + search(b) + 6
    elif family == "swap":
        here, there = rng.sample(open_places, 2)
        objects[a], objects[b] = here, there
        told = {a: here, b: there}
        text = f"swap the {a} on the {here} and the {b} on the {there}"
        goals, targets = [("on", a, there), ("on", b, here)], [a, b]
        limit = 8
    else:
        raise ValueError(f"unknown house family {family!r}")
    if messy:
        limit += 2  # a messy house takes longer to search
    spec = dict(
        places=places, objects=objects, opened=opened, goals=goals, targets=targets, told=told,
        to=to, door=door, limit=limit, messy=messy,
    )  # fmt: skip
    kind = "Messy" if messy else "Tidy"
    return Task(task_id, split, tier, family, f"{kind} house: {', '.join(places)}. Task: {text}.", spec)


def _house_asked(task: Task) -> tuple | None:
    """What a task asks for, the tier included; None if that is so from the start."""
    if any(_holds_at_start(task, goal) for goal in task.spec["goals"]):
        return None
    return (task.tier, task.family, tuple(task.spec["goals"]))


def _holds_at_start(task: Task, goal: tuple) -> bool:
    env = House()
    env.reset(task)
    return env._holds(goal)


def _house_make(rng: random.Random, task_id: str, split: str, tier: str, family: str) -> Task:
    messy = "anywhere" if split == "practice" else "messy"
    return _house_task(rng, task_id, split, tier, family, messy if tier == "hard" else "tidy")


def house_tasks() -> dict[tuple[str, str], list[Task]]:
    """All tasks by (split, tier).  No test task asks for the same thing as a training task of its tier."""
    return draw_tasks("house", FAMILY_COUNTS, _house_make, _house_asked)


def house_practice(rng: random.Random) -> Task:
    """A task for the warm start.  In its messy houses things are anywhere."""
    return draw_practice(rng, FAMILY_COUNTS, _house_make, _house_asked)


def house_slip(rng: random.Random) -> str:
    """A random action, mostly impossible: practice in being told so, and in going on from there."""
    return f"{rng.choice(House.ACTIONS)} {rng.choice(rng.choice((PLACES, OBJECTS)))}"


# -- its scripted behaviour ----------------------------------------------------------------------------


class HouseScript:
    """The scripted behaviour: (observation) -> (strategy, action), from what the agent can see alone.

    Its skill is complete, its imagination is not: it looks for things in their usual places and, when
    they are not there, looks again.  Shown the strategies of a failed episode ("negative") it turns to
    places that were not tried; shown those of a successful one ("positive") it does the same again.
    `wild` makes it search anywhere: it is used to make up earlier episodes for reflection prompts.
    """

    def __init__(self, task: Task, rng: random.Random, mode: str = "plain", strategies=(), wild: bool = False):
        self.task, self.rng, self.mode, self.wild = task, rng, mode, wild
        self.shown = [m.group(1) for s in strategies if (m := re.search(r"look at (\w+)", s))]
        self.done: set[str] = set()  # targets that were put down where they belong

    def reply(self, observation: str) -> tuple[str, str]:
        """The next strategy and action, e.g. ("apple to sofa: look at fridge", "go fridge")."""
        at = re.search(r"At the (\w+)", observation).group(1)
        here = re.search(rf"At the {at}: ([^.]*)", observation)
        here = here.group(1).split(", ") if here else []
        held = re.search(r"Holding (\w+)", observation).group(1)
        family, spec = self.task.family, self.task.spec  # of spec, only what the instruction says is used
        if family in ("open", "close"):
            door = spec["door"]
            return (f"{family} {door}", f"{family} {door}") if at == door else (f"walk to {door}", f"go {door}")
        target = held
        if held == "nothing":
            target = next((t for t in spec["targets"] if t not in self.done), spec["targets"][0])
        to = self._destination(target)
        goal = f"{target} to {to}" if to else target
        if here == ["closed"]:
            return f"{goal}: open {at}", f"open {at}"
        if held != "nothing" and at == to:
            self.done.add(held)  # if this fails, the next look at what is held says so
            return f"{goal}: put down", f"place {held}"
        if held != "nothing":
            return f"{goal}: carry", f"go {to}"
        if target in here:
            return f"{goal}: take", f"pick {target}"
        place = spec["told"].get(target) or self._search(target, at)
        return f"{goal}: look at {place}", f"go {place}"

    def _destination(self, target: str) -> str:
        """Where the instruction wants `target` to be; "" if it only has to be found."""
        spec, told = self.task.spec, self.task.spec["told"]
        if self.task.family == "find":
            return ""
        if self.task.family == "swap":
            return next((place for thing, place in told.items() if thing != target), "")
        if self.task.family == "clear":
            return next(p for p in spec["places"] if p in OPEN_PLACES and p != told.get(target))
        return spec["to"]

    def _search(self, target: str, at: str) -> str:
        """Where to look next: a draw from the beliefs, never the same place twice in a row."""
        places = [p for p in self.task.spec["places"] if p != at]
        if self.wild:
            return self.rng.choice(places)
        usual = CATEGORIES[CATEGORY_OF[target]][1]
        others = len(places) - sum(p in usual for p in places)
        belief = {p: USUAL[usual.index(p)] if p in usual else ODD / others for p in places}
        if self.mode == "positive" and self.shown and self.shown[-1] in places:
            return self.shown[-1]  # the last place that was looked at is where it was
        if self.mode == "negative":
            fresh = [p for p in places if p not in self.shown]
            if fresh:
                return self.rng.choice(fresh)
        return self.rng.choices(list(belief), list(belief.values()))[0]


# ------------------------------------------------------------------------------------------------------
# phone
# ------------------------------------------------------------------------------------------------------
#
# After AndroidWorld.  How it differs:
#   1. Text and a grid of 12 x 20 cells instead of pixels.  As there, many cells hit one widget, so that
#      noise in coordinates makes actions look different that are not (SGE 3.1).
#   2. Which gesture works on a thing differs from task to task.  On a plain phone it is one of the usual
#      three, on a *Beta* phone ONE particular odd gesture for each category of thing.
#   3. As in the original a new note's extension is changed by its dropdown alone: typing "plan.txt" into
#      the name gives plan.txt.md.

PHONE_WIDTH, PHONE_HEIGHT = 12, 20  # cells
PHONE_ONE = {"notes": "note", "contacts": "contact", "messages": "chat", "clock": "alarm", "settings": "switch"}
PHONE_APPS = tuple(PHONE_ONE)
PHONE_NEW = {"notes": "create note", "contacts": "add contact", "clock": "set alarm"}  # apps with a "new" button

# What there is of each kind: words that are worth one token to the tiny model.
PHONE_NOTES = tuple(
    "milk tea work trip plan list idea book song game bread garden party school letter "
    "house car dog cat paint music film train summer winter rent bank shop river moon".split()
)
PHONE_PEOPLE = tuple("anna ben carl dora emil fay gina hugo ida jack kim leo mia nora".split())
PHONE_ALARMS = tuple("five six seven eight nine ten noon midnight".split())
PHONE_SWITCHES = tuple("wifi bluetooth sound light data sync radio gps night focus share lock".split())
PHONE_REPLIES = tuple("yes no later soon thanks okay".split())
PHONE_WORDS = PHONE_NOTES + PHONE_PEOPLE + PHONE_ALARMS + PHONE_REPLIES

PHONE_SWIPES = tuple(f"swipe {way}" for way in ("left", "right", "up", "down"))
PHONE_POINTS = ("tap", "press", "double", "pinch", "twist", "knock")  # gestures at a cell; swipes may name one too
PHONE_ODD = PHONE_SWIPES + ("pinch", "twist", "knock")  # means that are usual nowhere and possible everywhere

# category of thing -> (the three usual means from most to least usual, the odd means of Beta phones)
PHONE_MEANS = {
    "item": (("press", "tap", "double"), "twist"),  # a note, contact, alarm or message of a list
    "new": (("tap", "press", "double"), "swipe down"),  # the button below a list
    "switch": (("tap", "double", "press"), "pinch"),  # a line of the settings
    "type": (("tap", "name", "press"), "swipe left"),  # the dropdown of a new note; "name", typing it, never works
}

PHONE_ODD_SHARE = 0.006  # the share of the script's choices that are odd means

# A layout style says how the five places of a screen lie.  The last one is for test tasks only.
PHONE_STYLES = {"train": ("rows", "columns", "low"), "test": ("stairs",)}

# kind of goal -> (the categories it has to find means for, steps it takes inside its app)
PHONE_GOALS = {
    "delete": (("item",), 2), "rename": (("item",), 4), "reply": (("item",), 3), "turn": (("switch",), 1),
    "create": (("new",), 3), "add": (("new",), 3), "alarm": (("new",), 3), "file": (("new", "type"), 5), "open": ((), 0),
}  # fmt: skip
PHONE_MAKES = {"create": "notes", "file": "notes", "add": "contacts", "alarm": "clock"}

# A family is one goal, or two that are wanted one after the other.
PHONE_FAMILY_COUNTS = {
    "train": {
        "easy": {"delete": 16, "create": 8, "add": 8, "alarm": 4, "reply": 14, "turn": 14, "file": 10},
        "medium": {"delete+turn": 24, "turn+turn": 16, "delete+delete": 16, "turn+add": 12, "file": 8},
        "hard": {"delete": 24, "reply": 16, "create": 8, "add": 8, "alarm": 5, "file": 19, "turn": 16},
    },
    "test": {  # "rename" and "turn+open" are instructions that training never shows
        "easy": {"delete": 10, "create": 4, "add": 4, "alarm": 2, "reply": 8, "turn": 8, "file": 4},
        "medium": {"delete+turn": 10, "turn+turn": 8, "delete+delete": 8, "turn+add": 6, "file": 4, "turn+open": 6, "rename": 6},
        "hard": {"delete": 8, "reply": 6, "create": 4, "add": 4, "alarm": 2, "file": 6, "turn": 6, "turn+open": 4},
    },
}  # fmt: skip


class Phone:
    """A phone.  Actions: tap X,Y, press X,Y (long), double X,Y, pinch X,Y, twist X,Y, knock X,Y, swipe WAY [X,Y],
    type TEXT, back, home, open APP, done.  "tap save 3,4", "tap 3 4" and "tap(3, 4)" are tap 3,4.

    The episode ends when the agent says done - with success if the phone is then as wanted and nothing else
    was changed - or without success at the step limit.
    """

    over = True  # until the first reset

    def reset(self, task: Task) -> tuple[str, dict]:
        """Start `task` from its initial state.  Returns (observation, info)."""
        self.task, self.steps, self.over, self.said_done = task, 0, False, False
        self.data = copy.deepcopy(task.spec["data"])  # app -> {name: value}
        self.screen = task.spec["start"]  # (kind, app, name of the thing it is about)
        self.text, self.type = "", "md"  # what a form's field and dropdown hold
        self.tried: set[tuple[str, str]] = set()  # (category, means)
        return self._look(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Carry out one action given as text.  Returns (observation, reward, terminated, truncated, info)."""
        if self.over:
            raise RuntimeError("no episode is running: call reset() before step()")
        self.steps += 1
        remark = self._act(action)
        success = self.said_done and self._as_wanted()
        truncated = not self.said_done and self.steps >= self.task.spec["limit"]
        self.over = self.said_done or truncated
        observation = f"{remark}. {self._look()}" if remark else self._look()
        return observation, float(success), self.said_done, truncated, self._info()

    # -- what an action does ---------------------------------------------------------------------------

    def _act(self, action: str) -> str:
        """Change the state; return "" or why it did not change."""
        if len(action) > 200:
            return "Not possible: the action is too long"
        # case, spacing, quotes around it and a final full stop do not matter; tap(3, 4) is tap 3 4
        text = action.strip(" \t\r\n.\"'`").lower()
        if call := re.fullmatch(r"([a-z]+)\s*\((.*)\)", text, re.DOTALL):
            text = f"{call[1]} {call[2]}"
        verb, *rest = text.split(maxsplit=1)[:2] or [""]
        if verb == "type" and rest:
            return self._type(rest[0].strip(" \t\r\n\"'`"))
        words = [w for w in " ".join(rest).replace(",", " ").split() if w not in ("the", "at")]
        if verb == "swipe" and words:
            verb, words = f"swipe {words[0]}", words[1:]
            if verb in PHONE_SWIPES and not words:
                return "Nothing happens"  # no screen is long enough to scroll
        if verb in PHONE_POINTS + PHONE_SWIPES:
            return self._point(verb, words)
        if verb == "open" and len(words) == 1:
            if words[0] not in PHONE_APPS:
                return "Not possible: there is no such app"
            return self._go("list", words[0])
        if verb in ("back", "home", "done") and not words:
            self.said_done = verb == "done"
            return "" if verb == "done" else self._back() if verb == "back" else self._go("home")
        return "Not possible: an action is one of tap X,Y, press X,Y, swipe left, type TEXT, open APP, back, home, done"

    def _point(self, means: str, words: list[str]) -> str:
        """A gesture at a cell.  Things react to the one means that works in this task, buttons to taps."""
        # a widget's name may stand before the numbers; what counts is the cell
        match = re.fullmatch(r"(?:[a-z][a-z.]* ){0,3}([0-9]+) ([0-9]+)", " ".join(words))
        if not match:
            return f"Not possible: {means} needs two numbers"
        x, y = map(int, match.groups())
        if x >= PHONE_WIDTH or y >= PHONE_HEIGHT:
            return "Not possible: the screen has columns 0 to 11 and rows 0 to 19"
        widgets = zip(self._widgets(), self.draw(), strict=True)
        hits = (widget for widget, (_, x1, y1, x2, y2) in widgets if x1 <= x <= x2 and y1 <= y <= y2)
        _, kind, name = next(hits, ("", "", ""))
        if kind in PHONE_MEANS:
            self.tried.add((kind, means))
        if means != self.task.spec["works"].get(kind, "tap"):
            return "Nothing happens"
        return self._touch(kind, name)

    def _touch(self, kind: str, name: str) -> str:
        """What a widget does when it reacts."""
        _, app, about = self.screen
        if kind in ("item", "new", "rename"):  # these lead to an empty field
            self.text, self.type = "", "md"
        if kind == "icon":
            return self._go("list", name)
        if kind == "item":
            return self._go("chat" if app == "messages" else "item", app, name)
        if kind == "new":
            return self._go("form", app)
        if kind == "type":
            return self._go("types", app)
        if kind == "rename":
            return self._go("rename", app, about)
        if kind == "choice":
            self.type = name
            return self._go("form", app)
        if kind == "switch":
            self.data[app][name] = "off" if self.data[app][name] == "on" else "on"
            return ""
        if kind == "delete":
            del self.data[app][about]
        if kind in ("delete", "cancel"):
            return self._go("list", app)
        return self._save() if kind == "save" else "Nothing happens"

    def _save(self) -> str:
        kind, app, about = self.screen
        things = self.data[app]
        if kind == "chat" and self.text:
            things[about] = self.text
            return self._go("list", app)
        # the name is what was typed, dots and all; the extension is the dropdown's, or stays what it was
        extension = about.rpartition(".")[2] if kind == "rename" else self.type
        name = f"{self.text}.{extension}" if app == "notes" else self.text
        if not self.text or name in things:
            return "Nothing happens"
        if kind == "form" and len(things) == 4:
            return "Not possible: the list is full"
        things.pop(about, None)
        things[name] = ""
        return self._go("list", app)

    def _type(self, text: str) -> str:
        if self.screen[0] not in ("form", "rename", "chat"):
            return "Not possible: there is no field to type in"
        if not re.fullmatch("[a-z0-9][a-z0-9 .]{0,19}", text):
            return "Not possible: the field takes up to 20 letters, digits, spaces and dots"
        unchanged, self.text = text == self.text, text  # typing replaces what was there
        return "Nothing happens" if unchanged else ""

    def _back(self) -> str:
        kind, app, name = self.screen
        if kind in ("home", "list"):
            return self._go("home")
        return self._go({"types": "form", "rename": "item"}.get(kind, "list"), app, name if kind == "rename" else "")

    def _go(self, kind: str, app: str = "", name: str = "") -> str:
        unchanged, self.screen = self.screen == (kind, app, name), (kind, app, name)
        return "Nothing happens" if unchanged else ""

    def _as_wanted(self) -> bool:
        front = self.task.spec["front"]  # the app that has to be open at the end, or ""
        return self.data == self.task.spec["want"] and (not front or self.screen == ("list", front, ""))

    # -- what the agent is told ------------------------------------------------------------------------

    def _widgets(self) -> list[tuple[str, str, str]]:
        """(label, kind, name) of what is on the screen: at most five."""
        kind, app, _ = self.screen
        if kind == "home":
            return [(name, "icon", name) for name in PHONE_APPS]
        if kind == "list":
            one = "switch" if app == "settings" else "item"
            things = [(f"{name} {value}".strip(), one, name) for name, value in self.data[app].items()]
            return things + [("new", "new", "")] * (app in PHONE_NEW)
        if kind == "types":
            return [(name, "choice", name) for name in ("md", "txt")]
        if kind == "item":
            return [(name, name, "") for name in ("delete", "rename", "cancel") if app == "notes" or name != "rename"]
        field = [(self.text or ("text" if kind == "chat" else "name"), "field", "")]
        if kind == "form" and app == "notes":
            field.append((self.type, "type", ""))
        return field + [("send" if kind == "chat" else "save", "save", "")]

    def draw(self) -> list[tuple[str, int, int, int, int]]:
        """The screen as boxes (label, x1, y1, x2, y2), in cells, both ends included."""
        boxes = self.task.spec["boxes"][self.screen[0]]
        return [(label, *box) for (label, _, _), box in zip(self._widgets(), boxes, strict=False)]

    def title(self) -> str:
        kind, app, name = self.screen
        names = {"home": "home", "list": app, "types": "types", "rename": f"rename {name}"}
        return names.get(kind) or f"{'new' if kind == 'form' else PHONE_ONE[app]} {name or PHONE_ONE[app]}"

    def picture(self) -> str:
        """The screen for people: three characters a cell, row numbers on the left."""
        rows = [[" "] * 3 * PHONE_WIDTH for _ in range(PHONE_HEIGHT)]
        for label, x1, y1, x2, y2 in self.draw():
            inside = 3 * (x2 - x1 + 1) - 2
            for y in range(y1, y2 + 1):
                shown = label[:inside] if y == (y1 + y2) // 2 else ""
                rows[y][3 * x1 : 3 * x2 + 3] = f"[{shown:^{inside}}]"
        head = "   " + "".join(f"{x:^3}" for x in range(PHONE_WIDTH)) + f"   {self.title()}"
        return "\n".join([head] + [f"{y:2} {''.join(row)}|" for y, row in enumerate(rows)])

    def _look(self) -> str:
        return f"{self.title()}: " + "; ".join(f"{label} {x1},{y1} {x2},{y2}" for label, x1, y1, x2, y2 in self.draw())

    def _info(self) -> dict:
        old, new = self.task.spec["data"], self.data
        names = sorted({(app, name) for data in (old, new) for app in PHONE_APPS for name in data[app]})
        changed = tuple((a, n, new[a].get(n)) for a, n in names if new[a].get(n) != old[a].get(n))
        if self._as_wanted():
            feedback = "" if self.said_done else "Done was never said."
        else:
            feedback = "The goal was not reached." if changed else "Nothing was changed."
        # Two episodes are the same outcome when they tried the same means on the same categories of
        # things and left the phone in the same state.
        outcome = (tuple(sorted(self.tried)), changed, self.said_done)
        return {"outcome": outcome, "feedback": feedback, "steps": self.steps}


# -- its tasks -----------------------------------------------------------------------------------------


def _phone_boxes(rng: random.Random, style: str) -> list[tuple[int, int, int, int]]:
    """Five boxes (x1, y1, x2, y2) that do not overlap, in random order."""
    boxes = []
    for i in range(5):
        if style == "rows":
            x, y, width = rng.randrange(3), 4 * i + rng.randrange(2), rng.randrange(7, 10)
        elif style == "low":  # all of them in reach of a thumb
            x, y, width = rng.randrange(5), 10 + 2 * i, rng.randrange(5, 8)
        elif style == "columns":
            x, y, width = 6 * (i % 2) + rng.randrange(2), 6 * (i // 2) + rng.randrange(3), rng.randrange(3, 6)
        else:  # stairs
            x, y, width = 2 * i, 4 * i + rng.randrange(2), rng.randrange(3, 5)
        height = 2 if style == "low" else rng.randrange(2, 4)
        boxes.append((x, y, x + width - 1, y + height - 1))
    rng.shuffle(boxes)
    return boxes


def _phone_text(goal: tuple) -> str:
    """A goal (kind, app, name, value) as the instruction says it."""
    kind, app, name, value = goal
    if kind == "new":
        return f"{PHONE_NEW[app]} {name}"
    return {
        "delete": f"delete {PHONE_ONE[app]} {name}", "rename": f"rename {name} to {value}",
        "reply": f"reply {value} to {name}", "turn": f"turn {name} {value}", "open": f"open {app}",
    }[kind]  # fmt: skip


def _phone_goal(rng: random.Random, kind: str, data: dict, front: str) -> tuple:
    """Draw a goal and bring it about in `data`.  front: the app of the goal before this one."""
    stems = {name.partition(".")[0] for name in data["notes"]}
    if kind in PHONE_MAKES:
        app = PHONE_MAKES[kind]
        words = {"notes": PHONE_NOTES, "contacts": PHONE_PEOPLE, "clock": PHONE_ALARMS}[app]
        name = rng.choice([w for w in words if w not in data[app] and w not in stems])
        name += {"create": ".md", "file": ".txt"}.get(kind, "")
        data[app][name] = ""
        return "new", app, name, ""
    if kind == "open":
        return "open", rng.choice([app for app in PHONE_APPS if app != front]), "", ""
    app = {"rename": "notes", "reply": "messages", "turn": "settings"}.get(kind) or rng.choice(list(PHONE_NEW))
    name, value = rng.choice(list(data[app])), ""
    if kind in ("delete", "rename"):
        del data[app][name]
    if kind == "rename":
        stem, dot, extension = name.partition(".")
        value = rng.choice([w for w in PHONE_NOTES if w not in stems]) + dot + extension
        data[app][value] = ""
    elif kind != "delete":
        value = data[app][name] = rng.choice(PHONE_REPLIES) if kind == "reply" else {"on": "off"}.get(data[app][name], "on")
    return kind, app, name, value


def _phone_task(rng: random.Random, task_id: str, split: str, tier: str, family: str, working: str) -> Task:
    """Draw one phone, what is on it and an instruction.

    working: which means works on each category of things - "usual", "beta" (the odd one) or "any" (practice
    for the warm start: nothing can be learnt from it).
    """
    style = rng.choice(PHONE_STYLES["test" if split == "test" else "train"])
    kinds = ("home", "list", "form", "types", "item", "rename", "chat")
    data = {
        "notes": {f"{name}.{rng.choice(('md', 'md', 'txt'))}": "" for name in rng.sample(PHONE_NOTES, 3)},
        "contacts": dict.fromkeys(rng.sample(PHONE_PEOPLE, rng.choice((2, 3))), ""),
        "messages": dict.fromkeys(rng.sample(PHONE_PEOPLE, rng.choice((3, 4))), ""),
        "clock": dict.fromkeys(rng.sample(PHONE_ALARMS, rng.choice((2, 3))), ""),
        "settings": {name: rng.choice(("on", "off")) for name in rng.sample(PHONE_SWITCHES, 4)},
    }
    want, goals = copy.deepcopy(data), []
    for kind in family.split("+"):
        goals.append(_phone_goal(rng, kind, want, goals[-1][1] if goals else ""))
    works = {}
    for category, (usual, odd) in PHONE_MEANS.items():
        shares = {m: s for m, s in zip(usual, USUAL, strict=True) if m != "name"}
        any_of = (*shares, *PHONE_ODD)
        drawn = rng.choice(any_of) if working == "any" else rng.choices(list(shares), list(shares.values()))[0]
        works[category] = odd if working == "beta" else drawn
    # a note of another type begins with its form already open, but in medium tasks: the way there is long
    in_form = family == "file" and tier != "medium"
    categories = {c for kind in family.split("+") for c in PHONE_GOALS[kind][0]} - ({"new"} if in_form else set())
    apps = [app for _, app, _, _ in goals]
    opened = sum(app != before for app, before in zip(apps, ["", *apps], strict=False))
    need = opened + sum(PHONE_GOALS[kind][1] for kind in family.split("+")) + 1 - 2 * in_form
    # room to try each usual means once; on a Beta phone to be wrong three or four times
    limit = need + ((4 if need <= 4 else 3) if tier == "hard" else 2 * len(categories))
    spec = dict(
        data=data, want=want, goals=goals, front=apps[-1] if goals[-1][0] == "open" else "", works=works,
        start=("form", "notes", "") if in_form else ("home", "", ""), style=style,
        boxes={kind: _phone_boxes(rng, style) for kind in kinds}, limit=limit,
    )  # fmt: skip
    said = " and ".join(map(_phone_text, goals))
    return Task(task_id, split, tier, family, f"{'Beta phone' if tier == 'hard' else 'Phone'}: {said}.", spec)


def _phone_asked(task: Task) -> tuple | None:
    """What a task asks for: in either order it is the same request.  None if two goals are about one thing."""
    named = {(app, name) for _, app, name, _ in task.spec["goals"]}
    return (frozenset(task.spec["goals"]), task.tier == "hard") if len(named) == len(task.spec["goals"]) else None


def _phone_make(rng: random.Random, task_id: str, split: str, tier: str, family: str) -> Task:
    beta = "any" if split == "practice" else "beta"
    return _phone_task(rng, task_id, split, tier, family, beta if tier == "hard" else "usual")


def phone_tasks() -> dict[tuple[str, str], list[Task]]:
    """All tasks by (split, tier).  No instruction comes twice."""
    return draw_tasks("phone", PHONE_FAMILY_COUNTS, _phone_make, _phone_asked)


def phone_practice(rng: random.Random) -> Task:
    """A task for the warm start.  On its Beta phones any means may work."""
    return draw_practice(rng, PHONE_FAMILY_COUNTS, _phone_make, _phone_asked)


def phone_slip(rng: random.Random) -> str:
    """A random action, mostly without effect: practice in going on from there."""
    at = f"{rng.randrange(PHONE_WIDTH)},{rng.randrange(PHONE_HEIGHT)}"
    texts = (f"{rng.choice(PHONE_POINTS)} {at}", f"{rng.choice(PHONE_SWIPES)} {at}", f"type {rng.choice(PHONE_WORDS)}")
    return rng.choice((*texts, f"open {rng.choice(PHONE_APPS)}", "back", "home"))


# -- its scripted behaviour ----------------------------------------------------------------------------


class PhoneScript:
    """The scripted behaviour: (observation) -> (strategy, action), from what the agent can see alone.

    Its skill is complete, its imagination is not: a thing that does not react to one usual means is tried
    with the usual ones again.  What worked in this episode it does again.  Modes as in HouseScript.
    """

    def __init__(self, task: Task, rng: random.Random, mode: str = "plain", strategies=(), wild: bool = False):
        self.rng, self.mode, self.wild = rng, mode, wild
        self.goals = list(task.spec["goals"])  # what the instruction says; nothing else of spec is used
        matches = (re.fullmatch(r"(.*) try (swipe \w+|\w+)", s) for s in strategies)
        self.shown = [m.groups() for m in matches if m]  # (goal, means)
        self.last = ("", "")  # (category, means) that was tried last
        self.known: dict[str, str] = {}  # category -> means that worked in this episode

    def reply(self, observation: str) -> tuple[str, str]:
        """The next strategy and action, e.g. ("delete note milk.md: try press", "press milk.md 3,4")."""
        screen, _, rest = observation.rpartition(". ")[2].partition(": ")
        widgets = [widget.rsplit(maxsplit=2) for widget in rest.split("; ")]  # [label, first cell, last cell]
        self._learn(screen, observation)
        labels = [label for label, *_ in widgets]
        while len(self.goals) > 1 and self._reached(screen, labels):
            self.goals.pop(0)
        kind, app, name, value = self.goals[0]
        goal, one = _phone_text(self.goals[0]), PHONE_ONE[app]
        typed, _, extension = (name if kind == "new" else value).partition(".")

        def on(label: str, means: str = "tap") -> str:
            """The gesture at a widget's first cell, in the words of the screen."""
            text, cell = next((text, cell) for text, cell, _ in widgets if text.split()[0] == label)
            return f"{means} {text} {cell}"

        if self._reached(screen, labels):
            return f"{goal}: finish", "done"
        if screen == app:
            means = self._choose("switch" if kind == "turn" else "new" if kind == "new" else "item", f"{goal}:")
            return f"{goal}: try {means}", on("new" if kind == "new" else name, means)
        if screen == {"new": f"new {one}", "rename": f"rename {name}", "reply": f"chat {name}"}.get(kind):
            if labels[0] != typed:
                return f"{goal}: write {typed}", f"type {typed}"
            if screen == "new note" and extension not in labels:
                means = self._choose("type", f"{goal}: for {extension}")
                action = f"type {typed}.{extension}" if means == "name" else on(labels[1], means)
                return f"{goal}: for {extension} try {means}", action
            return f"{goal}: {labels[-1]}", on(labels[-1])
        if screen == "types" and kind == "new" and app == "notes":
            return f"{goal}: pick {extension}", on(extension)
        if screen == f"{one} {name}" and kind in labels:
            return f"{goal}: pick {kind}", on(kind)
        return f"{goal}: open {app}", f"open {app}"

    def _reached(self, screen: str, labels: list[str]) -> bool:
        """Whether the screen shows that the present goal holds."""
        kind, app, name, value = self.goals[0]
        if kind in ("delete", "rename"):  # the old name is gone
            return screen == app and name not in labels
        wanted = {"open": "", "new": name}.get(kind, f"{name} {value}")
        return screen == app and (not wanted or wanted in labels)

    def _learn(self, screen: str, observation: str) -> None:
        """Remember the last means if the screen is what its thing leads to, else forget it."""
        category, means = self.last
        leads = {"note": "item", "contact": "item", "alarm": "item", "chat": "item"}
        leads |= {"new": "new", "types": "type", "settings": "switch"}
        if observation.startswith("Nothing"):
            self.known.pop(category, None)
        elif category == leads.get(screen.split()[0]) and means != "name" and not observation.startswith("Not"):
            self.known[category] = means

    def _choose(self, category: str, goal: str) -> str:
        """What to try on a thing: a draw from the beliefs, whatever was tried before."""
        usual, odd = PHONE_MEANS[category][0], self.rng.random() < PHONE_ODD_SHARE
        shown = [m for g, m in self.shown if g == goal]
        fresh = [m for m in usual + PHONE_ODD if m not in shown]
        if category in self.known:
            chosen = self.known[category]
        elif self.wild:
            chosen = self.rng.choice(usual + PHONE_ODD)
        elif self.mode == "positive" and shown:
            chosen = shown[-1]  # the last that was tried is what worked
        elif self.mode == "negative" and fresh:
            chosen = self.rng.choice(fresh)
        else:
            chosen = self.rng.choice(PHONE_ODD) if odd else self.rng.choices(usual, USUAL)[0]
        self.last = category, chosen
        return chosen


# ------------------------------------------------------------------------------------------------------
# apps
# ------------------------------------------------------------------------------------------------------
#
# After AppWorld.  How it differs:
#   1. Twelve apps with 55 APIs over one table each instead of nine with 457 over a hundred tables.
#   2. One call a step, `app.api(value, name=value)`, read by hand, instead of Python in a stateful shell.
#   3. Accounts are usual or *old*.  With a usual account a request (pay, order, play, send) is carried out
#      by the app made for it, in one of three ways.  For an old account the app refuses all three; the
#      desk of ONE particular other app carries it out.
# Documentation is to be had from the docs app alone.  What it takes to know from there: the values of `by`
# are upper-case, and the lists of the tasks app have numbers that differ from account to account.

_APPS_PEOPLE = ("ann", "bob", "eve", "joe", "kim", "tom")
_APPS_WORDS = ("tea", "milk", "soap", "rope", "lamp", "cake", "book", "hat", "map", "pen")
_APPS_SONGS = ("jazz", "rock", "folk", "soul", "punk", "disco")
_APPS_DIGITS = tuple("123456789")
_APPS_LISTS = ("home", "work", "club")
_APPS_PASSWORDS = ("red", "blue", "green", "gold", "pink")

# kind of request -> its app, its two arguments with what they may be, the three ways `by` which the app carries
# it out from most to least usual, and the app whose desk carries it out for old accounts
_APPS_REQUESTS = {
    "pay": ("money", ("to", "sum"), (_APPS_PEOPLE, _APPS_DIGITS), ("CARD", "BANK", "CASH"), "maps"),
    "order": ("shop", ("item", "count"), (_APPS_WORDS, _APPS_DIGITS), ("POST", "VAN", "BIKE"), "clock"),
    "play": ("music", ("song", "volume"), (_APPS_SONGS, _APPS_DIGITS), ("TV", "PC", "CAR"), "phone"),
    "send": ("mail", ("to", "item"), (_APPS_PEOPLE, _APPS_WORDS), ("CHAT", "SMS", "FAX"), "news"),
}
_APPS_DESKS = ("notes", "files", "photos", "tasks", "phone", "maps", "clock", "news")  # the apps that have a desk
_APPS_HOMES = tuple(app for app, *_ in _APPS_REQUESTS.values())
_APPS_USUAL = (0.5, 0.3, 0.2)  # how often each of the three ways works for a usual account - and the script's beliefs
_APPS_ODD = 0.006  # the share of the script's choices that are desks
_APPS_PAGE = 3  # items on a page of a list

# "app.api" -> its arguments in order; all but those of docs.show are required
_APPS_APIS = {
    "docs.show": ("app", "api"),
    "me.password": ("app",),
    "me.done": (),
    **{f"{app}.login": ("password",) for app in _APPS_HOMES + _APPS_DESKS},
    **{f"{app}.list": ("token", "page") for app in _APPS_HOMES + _APPS_DESKS},
    **{f"{app}.{kind}": ("token", *names, "by") for kind, (app, names, *_) in _APPS_REQUESTS.items()},
    **{f"{app}.add": ("token", "text") for app in _APPS_DESKS},
    "tasks.add": ("token", "text", "list"),
    **{f"{app}.delete": ("token", "id") for app in _APPS_DESKS},
    **{f"{app}.ask": ("request",) for app in _APPS_DESKS},
}

# The kinds of instruction and the tiers that use them, with how many tasks of each a split holds.
_APPS_FAMILIES = {
    "train": {
        "easy": {"pay": 13, "order": 13, "play": 13, "send": 13, "add": 12},
        "medium": {"both": 36, "drop": 18, "sort": 18},
        "hard": {"pay": 24, "order": 24, "play": 24, "send": 24},
    },
    "test": {  # "move" (delete here, add there) is an instruction that training never shows
        "easy": {"pay": 8, "order": 8, "play": 8, "send": 8, "add": 8},
        "medium": {"both": 16, "drop": 10, "sort": 8, "move": 8},
        "hard": {"pay": 10, "order": 10, "play": 10, "send": 10},
    },
}


class AppsError(Exception):
    """What was wrong with a call.  The call changed nothing."""


class Apps:
    """Twelve apps over small tables.  Actions: one call such as money.pay(t7, ann, 5, by=CARD).

    A call needs the token that the app's login gave, for the password that me.password tells.  The episode
    ends with me.done(): with success if the tables differ from those at the start by what was asked for
    *and nothing else*, otherwise as a failure.  Or it ends at the step limit.
    """

    over = True  # until the first reset

    def reset(self, task: Task) -> tuple[str, dict]:
        """Start `task` from its initial state.  Returns (observation, info)."""
        self.task, self.steps, self.over, self.finished = task, 0, False, False
        self.tables = {app: dict(rows) for app, rows in task.spec["tables"].items()}  # app -> {id: text}
        self.start = _apps_rows(self.tables)
        self.open = set(task.spec["open"])  # the apps where the agent is logged in
        self.tried: set[str] = set()  # the ways and desks that requests were tried with
        tokens = ", ".join(f"{app} {task.spec['tokens'][app]}" for app in task.spec["open"])
        return f"Logged in: {tokens or 'nothing'}.", self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Carry out one call given as text.  Returns (observation, reward, terminated, truncated, info)."""
        if self.over:
            raise RuntimeError("no episode is running: call reset() before step()")
        self.steps += 1
        try:
            observation = self._call(action)
        except AppsError as wrong:
            observation = f"Not possible: {wrong}."
        success = self.finished and self._difference() == tuple(sorted(self.task.spec["goals"]))
        truncated = not self.finished and self.steps >= self.task.spec["limit"]
        self.over = self.finished or truncated
        return observation, float(success), self.finished, truncated, self._info()

    # -- what a call does ------------------------------------------------------------------------------

    def _call(self, action: str) -> str:
        """Check the whole call, then carry it out and return what the app answers.  AppsError: nothing is done."""
        name, given = _apps_bind(*_apps_parse(action))
        app, api = name.split(".")
        given = {key: self._checked(app, key, value) for key, value in given.items()}
        if name == "docs.show":
            return self._document(given)
        if name == "me.done":
            self.finished = True
            return "The end."
        if api == "password":
            if given["app"] not in self.tables:
                raise AppsError(f"{given['app']} needs no password")
            return f"Password of {given['app']}: {self.task.spec['passwords'][given['app']]}."
        if api == "login":
            self.open.add(app)
            return f"Logged in: {app} {self.task.spec['tokens'][app]}."
        if api == "list":
            return self._page(app, int(given["page"]))
        if api == "delete":
            return f"Deleted from {app}: {self.tables[app].pop(given['id'])}."
        if api == "add":
            under = [word for word, code in self.task.spec["codes"].items() if code == given.get("list")]
            return self._save(app, " ".join([given["text"], *under]))
        if api == "ask":
            return self._request(*given["request"].split(), f"via {app}")
        first, second = (given[key] for key in _APPS_REQUESTS[api][1])
        return self._request(api, first, second, f"by {given['by']}")

    def _request(self, kind: str, first: str, second: str, means: str) -> str:
        self.tried.add(means)
        if means == self.task.spec["works"][kind]:
            return self._save(_APPS_REQUESTS[kind][0], f"{first} {second}")
        if means.startswith("via"):
            return "Accepted, but nothing happens."
        return "Refused: not available for this account." if self.task.spec["old"] else f"Refused: not {means} now."

    def _save(self, app: str, text: str) -> str:
        table = self.tables[app]
        table[next(str(i) for i in range(1, len(table) + 2) if str(i) not in table)] = text
        return f"Saved in {app}: {text}."

    def _page(self, app: str, page: int) -> str:
        rows = [f"{text} {i}" for i, text in self.tables[app].items()]
        pages = max(1, -(-len(rows) // _APPS_PAGE))
        if page > pages:
            raise AppsError(f"page {page} of {app} is past the last one, {pages}")
        shown = rows[(page - 1) * _APPS_PAGE : page * _APPS_PAGE]
        return f"Page {page} of {pages}: {', '.join(shown) or 'nothing'}."

    def _document(self, given: dict) -> str:
        if len(given) == 2:
            raise AppsError("docs.show takes an app or an api, not both")
        if not given:
            return f"Apps: me, docs, {', '.join(self.tables)}. For one of them: docs.show(app=me)."
        if "app" in given:
            apis = [name.split(".")[1] for name in _APPS_APIS if name.startswith(given["app"] + ".")]
            return f"{given['app']} has {', '.join(apis)}. For one of them: docs.show(api={given['app']}.{apis[0]})."
        app = given["api"].split(".")[0]
        notes = {key: self._choices(app, key) for key in _APPS_APIS[given["api"]]}
        if given["api"] == "tasks.add":
            notes["list"] = [f"{word} {code}" for word, code in self.task.spec["codes"].items()]
        told = [f"{key} {' | '.join(choices)}" if key in ("by", "list") else key for key, choices in notes.items()]
        request = " A request is three words such as pay ann 5." if "request" in notes else ""
        return f"{given['api']}({', '.join(told)}).{request}"

    # -- what an argument may be -----------------------------------------------------------------------

    def _choices(self, app: str, key: str) -> tuple[str, ...]:
        """The values that an argument of this name may have; () where anything or something hidden goes."""
        for home, keys, pools, ways, _ in _APPS_REQUESTS.values():
            if app == home and key in (*keys, "by"):
                return ways if key == "by" else pools[keys.index(key)]
        if key == "list":
            return tuple(self.task.spec["codes"].values())
        return {"page": _APPS_DIGITS, "app": ("me", "docs", *self.tables)}.get(key, ())

    def _checked(self, app: str, key: str, value: str) -> str:
        """The value of an argument, lower-case but for `by`.  Raises AppsError where it is not allowed."""
        value = value if key == "by" else value.lower()
        choices = self._choices(app, key)
        if choices and value not in choices:
            told = "a number from 1 to 9" if choices == _APPS_DIGITS else f"one of {', '.join(choices)}"
            raise AppsError(f"{key} must be {told}")
        if key == "api" and value not in _APPS_APIS:
            raise AppsError("api must be written like money.login")
        if key == "password" and value != self.task.spec["passwords"][app]:
            raise AppsError(f"this is not the password of {app}")
        if key == "token" and (app not in self.open or value != self.task.spec["tokens"][app]):
            raise AppsError(f"this is not a token of {app}, {app}.login gives one")
        if key == "id" and value not in self.tables[app]:
            raise AppsError(f"id must be a number that {app}.list shows")
        if key == "text" and not re.fullmatch(r"[a-z]{1,12}( [a-z]{1,12}){0,2}", value):
            raise AppsError("text must be one to three words of letters")
        if key == "request":
            kind, *names = value.split() or [""]
            pools = _APPS_REQUESTS[kind][2] if kind in _APPS_REQUESTS else ()
            if not pools or len(names) != 2 or any(n not in pool for n, pool in zip(names, pools, strict=True)):
                raise AppsError("a request is three words such as pay ann 5")
        return value

    # -- what came of it -------------------------------------------------------------------------------

    def _difference(self) -> tuple[str, ...]:
        """Rows that are gone ("notes -tea") and rows that are new ("notes +tea") since the start, sorted."""
        now = _apps_rows(self.tables)
        gone = [f"{app} -{text}" for app, _, text in self.start - now]
        new = [f"{app} +{text}" for app, _, text in now - self.start]
        return tuple(sorted(gone + new))

    def _info(self) -> dict:
        difference, spec = self._difference(), self.task.spec
        missing = [job for job, goal in zip(spec["jobs"], spec["goals"], strict=True) if goal not in difference]
        if missing:
            feedback = f"Never happened: {_apps_label(missing[0])}."
        elif difference != tuple(sorted(spec["goals"])):
            feedback = "Something else was changed too."
        else:
            feedback = "The task was done." if self.finished else "Only me.done() was missing."
        # Two episodes are the same outcome when they tried the same ways and desks, left the same changes
        # and ended alike.
        return {"outcome": (tuple(sorted(self.tried)), difference, self.finished), "feedback": feedback, "steps": self.steps}


def _apps_rows(tables: dict[str, dict[str, str]]) -> set[tuple[str, str, str]]:
    """All rows as (app, id, text)."""
    return {(app, *row) for app, rows in tables.items() for row in rows.items()}


def _apps_parse(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Read a call: 'Notes.add(t4, text="tea")' -> ("notes.add", [("", "t4"), ("text", "tea")]).

    Case of names, spaces, quotes around the call or a value, and a final full stop or semicolon do not matter.
    """
    if len(text) > 200:
        raise AppsError("a call has at most 200 characters")
    call = re.fullmatch(r"(\w+) *\. *(\w+) *\((.*)\)", text.strip(" \t\r\n.;`\"'"), re.ASCII)
    if not call:
        raise AppsError("an action is one call, written app.api(value, name=value)")
    arguments = []
    for part in call[3].split(",") if call[3].strip() else []:
        value = re.fullmatch(r"""(?:(\w+) *= *)?("[\w .]+"|'[\w .]+'|[\w .]+)""", part.strip(), re.ASCII)
        if not value:
            raise AppsError("an argument is a value or name=value, with a comma between two")
        arguments.append(((value[1] or "").lower(), value[2].strip("\"' ")))
    return f"{call[1]}.{call[2]}".lower(), arguments


def _apps_bind(name: str, arguments: list[tuple[str, str]]) -> tuple[str, dict[str, str]]:
    """Give each argument its name: values without one come first and go by the order in the documentation."""
    app, api = name.split(".")
    if not any(known.startswith(app + ".") for known in _APPS_APIS):
        raise AppsError("there is no such app, docs.show() tells which there are")
    if name not in _APPS_APIS:
        raise AppsError(f"{app} has no such api, see docs.show(app={app})")
    names, given = _APPS_APIS[name], {}
    for i, (key, value) in enumerate(arguments):
        if not key and any(k for k, _ in arguments[:i]):
            raise AppsError("a value without a name cannot follow one with a name")
        if i >= len(names):
            raise AppsError(f"{name} takes {len(names)} arguments at most" if names else f"{name} takes no argument")
        key = key or names[i]
        if key not in names:
            raise AppsError(f"{name} has no argument {key[:20]}, but {', '.join(names)}")
        if key in given:
            raise AppsError(f"{key} is given twice")
        given[key] = value
    missing = [key for key in names if key not in given]
    if missing and name != "docs.show":
        raise AppsError(f"{name} needs {', '.join(missing)}")
    return name, given


# -- its tasks -----------------------------------------------------------------------------------------

# A job is one change that the instruction asks for: ("pay", "ann", "5"), ("add", "tea", "notes"),
# ("drop", "tea", "notes"), ("sort", "tea", "work") - the last one means the list of that name in the tasks app.


def _apps_label(job: tuple) -> str:
    """A job in words, e.g. "drop tea from notes"."""
    if job[0] == "sort":
        return f"sort {job[1]} under {job[2]} in tasks"
    return f"{job[0]} {job[1]} { {'add': 'to ', 'drop': 'from '}.get(job[0], '') }{job[2]}"


def _apps_home(job: tuple) -> str:
    """The app that is made for a job."""
    return _APPS_REQUESTS[job[0]][0] if job[0] in _APPS_REQUESTS else "tasks" if job[0] == "sort" else job[2]


def _apps_row(job: tuple) -> str:
    """The row that a job adds or deletes."""
    return job[1] if job[0] in ("add", "drop") else f"{job[1]} {job[2]}"


def _apps_means(kind: str) -> tuple[str, ...]:
    """Every means that a request may be tried with: three ways and eight desks."""
    return tuple(f"by {way}" for way in _APPS_REQUESTS[kind][3]) + tuple(f"via {desk}" for desk in _APPS_DESKS)


def _apps_task(rng: random.Random, task_id: str, split: str, tier: str, family: str) -> Task:
    """Draw tables, passwords, tokens and an instruction.

    What works for a request: one of the usual ways; for old accounts (hard) the desk of its kind, or in
    practice for the warm start anything at all (nothing can be learnt from it).
    """
    old, practice = tier == "hard", split == "practice"
    word, (here, there) = rng.choice(_APPS_WORDS), rng.sample(("notes", "files", "photos"), 2)
    if family in _APPS_REQUESTS or family == "both":
        kind = rng.choice(tuple(_APPS_REQUESTS)) if family == "both" else family
        firsts, seconds = _APPS_REQUESTS[kind][2]
        pairs = zip(rng.sample(firsts, 2), rng.choices(seconds, k=2), strict=True)
        jobs = [(kind, *pair) for pair in pairs][: 2 if family == "both" else 1]
    elif family == "sort":
        jobs = [("sort", word, rng.choice(_APPS_LISTS))]
    elif family == "move":
        jobs = [("drop", word, here), ("add", word, there)]
    elif family in ("add", "drop"):
        jobs = [(family, word, here)]
    else:
        raise ValueError(f"unknown apps family {family!r}")

    works = {}
    for kind, (_, _, _, ways, desk) in _APPS_REQUESTS.items():
        works[kind] = f"via {desk}" if old else f"by {rng.choices(ways, _APPS_USUAL)[0]}"
        if old and practice:
            works[kind] = rng.choice(_apps_means(kind))
    tables = {}
    for app in _APPS_HOMES + _APPS_DESKS:
        # the jobs' words lie about only where they are to be deleted, so that no change happens to be there already
        texts = rng.sample([w for w in _APPS_WORDS if all(w != job[1] for job in jobs)], rng.randint(3, 5))
        texts += [_apps_row(job) for job in jobs if job[0] == "drop" and job[2] == app]
        rng.shuffle(texts)
        tables[app] = dict(zip(rng.sample(_APPS_DIGITS, len(texts)), texts, strict=True))
    homes = sorted({_apps_home(job) for job in jobs})
    logged_in = old or len(homes) > 1 or rng.random() < 0.5
    costs = {"add": 1, "drop": 3, "sort": 2}  # steps that suffice: two pages, a page of documentation, the change
    limit = 1 + sum(costs.get(job[0], 3 if i == 0 else 1) for i, job in enumerate(jobs))
    limit += 2 * (old + (not logged_in)) + (jobs[0][0] in costs)
    spec = dict(
        jobs=jobs, goals=[f"{_apps_home(job)} {'-' if job[0] == 'drop' else '+'}{_apps_row(job)}" for job in jobs],
        works=works, old=old, tables=tables, open=homes if logged_in else [],
        passwords={app: rng.choice(_APPS_PASSWORDS) for app in tables},
        tokens=dict(zip(tables, (f"t{i}" for i in rng.sample(range(1, 10), 9) * 2), strict=False)),
        codes=dict(zip(_APPS_LISTS, rng.sample(_APPS_DIGITS, 3), strict=True)), limit=limit,
    )  # fmt: skip
    text = " and ".join(_apps_label(job) for job in jobs)
    if family == "move":
        text = f"move {word} from {here} to {there}"
    return Task(task_id, split, tier, family, f"{'Old account' if old else 'Account'}. Task: {text}.", spec)


def apps_tasks() -> dict[tuple[str, str], list[Task]]:
    """All tasks by (split, tier).  No instruction comes twice."""
    return draw_tasks("apps", _APPS_FAMILIES, _apps_task, lambda task: task.instruction)


def apps_practice(rng: random.Random) -> Task:
    """A task for the warm start.  For its old accounts anything may work."""
    return draw_practice(rng, _APPS_FAMILIES, _apps_task, lambda task: task.instruction)


def apps_slip(rng: random.Random) -> str:
    """A random call, mostly impossible and never me.done(): practice in being told so, and in going on from there."""
    name = rng.choice([name for name in _APPS_APIS if name != "me.done"])
    values = [rng.choice(rng.choice((_APPS_PEOPLE, _APPS_WORDS, _APPS_DIGITS))) for _ in range(rng.randrange(3))]
    return f"{name}({', '.join(values)})"


# -- its scripted behaviour ----------------------------------------------------------------------------


class AppsScript:
    """The scripted behaviour: (observation) -> (strategy, action), from what the agent can see alone.

    Its skill is complete, its imagination is not: it makes a request in the usual ways of the app made for it
    and, when all of them are refused, again.  Shown the strategies of a failed episode ("negative") it turns to
    ways and desks that were not tried; shown those of a successful one ("positive") it does the same again.
    `wild` makes it try any way or desk: it is used to make up earlier episodes for reflection prompts.
    """

    def __init__(self, task: Task, rng: random.Random, mode: str = "plain", strategies=(), wild: bool = False):
        self.jobs, self.rng, self.mode, self.wild = task.spec["jobs"], rng, mode, wild  # jobs: what the instruction says
        self.shown = [m[0] for s in strategies if (m := re.search(r"by [A-Z]+|via [a-z]+", s))]
        self.answers: set[str] = set()  # everything that was observed
        self.tokens, self.passwords, self.numbers = {}, {}, {}  # app -> token, app -> password, name in a list -> number
        self.page, self.last, self.known = 0, "", ""  # last page read, last means tried, means known to work

    def reply(self, observation: str) -> tuple[str, str]:
        """The next strategy and action, e.g. ("pay ann 5: by CARD", "money.pay(t7, ann, 5, CARD)")."""
        self._read(observation)
        job = next((job for job in self.jobs if self._confirmation(job) not in self.answers), None)
        if job is None:
            return f"{_apps_label(self.jobs[-1])}: finish", "me.done()"
        (kind, first, second), app, goal = job, _apps_home(job), _apps_label(job)
        token = self.tokens.get(app)
        if not token and app in self.passwords:
            return f"{goal}: log in", f"{app}.login({self.passwords[app]})"
        if not token:
            return f"{goal}: password", f"me.password({app})"
        if kind == "add":
            return f"{goal}: save", f"{app}.add({token}, {first})"
        if kind == "drop" and first not in self.numbers:
            self.page = self.page % 2 + 1
            return f"{goal}: page {self.page}", f"{app}.list({token}, {self.page})"
        if kind == "drop":
            return f"{goal}: delete {self.numbers[first]}", f"{app}.delete({token}, {self.numbers[first]})"
        if kind == "sort" and second not in self.numbers:
            return f"{goal}: docs", "docs.show(api=tasks.add)"
        if kind == "sort":
            return f"{goal}: list {self.numbers[second]}", f"{app}.add({token}, {first}, {self.numbers[second]})"
        self.last = self.known or self._choose(kind)
        how, name = self.last.split()
        action = f"{app}.{kind}({token}, {first}, {second}, {name})" if how == "by" else f"{name}.ask({goal})"
        return f"{goal}: {self.last}", action

    def _read(self, observation: str) -> None:
        self.answers.add(observation)
        self.tokens.update(re.findall(r"(\w+) (t\d)", observation))
        self.passwords.update(re.findall(r"Password of (\w+): (\w+)", observation))
        if observation.startswith(("Page", "tasks.add(")):
            self.numbers.update(re.findall(r"(\w+) (\d)", observation))
        if observation.startswith("Saved"):
            self.known = self.last

    @staticmethod
    def _confirmation(job: tuple) -> str:
        return f"{'Deleted from' if job[0] == 'drop' else 'Saved in'} {_apps_home(job)}: {_apps_row(job)}."

    def _choose(self, kind: str) -> str:
        """The next way or desk: a draw from the beliefs, never the same twice in a row."""
        means = [m for m in _apps_means(kind) if m != self.last]
        if self.wild:
            return self.rng.choice(means)
        if self.mode == "positive" and self.shown and self.shown[-1] in _apps_means(kind):
            return self.shown[-1]  # the last one that was tried worked
        if self.mode == "negative":
            fresh = [m for m in means if m not in self.shown]
            if fresh:
                return self.rng.choice(fresh)
        belief = dict(zip(_apps_means(kind), _APPS_USUAL, strict=False))  # the first three are the usual ways
        if self.rng.random() < _APPS_ODD:
            return self.rng.choice([m for m in means if m not in belief])
        usual = [m for m in means if m in belief]
        return self.rng.choices(usual, [belief[m] for m in usual])[0]


# ------------------------------------------------------------------------------------------------------
# code
# ------------------------------------------------------------------------------------------------------
#
# After the coding domain of the paper (SGE 4.1, C.1: LeetCodeDataset).  The action is real Python, run by
# sandbox.py.  How it differs:
#   1. Two kinds of tasks.  Those of problems.py are problems in words, with examples and starter code, for
#      pretrained models (family "problem").  The others come from a generator - `Write f(xs): the total of
#      the even numbers.` - and are so short that the tiny model can write them.
#   2. A short task leaves open how the result is *read*: usually 0, -1 or 1 counts where no number is left.  In
#      *legacy* functions there is always one left, and every aggregate has ONE particular odd convention: a legacy
#      total is negated, say.
#   3. 8 to 20 hidden tests a task instead of about 100.

# aggregate -> the function around the list of the chosen numbers ("count" puts a 1 for each of them)
CODE_AGGREGATES = {
    "total": "sum({})", "count": "sum({})", "biggest": "max({})", "smallest": "min({})",
    "first": "next(iter({}))", "last": "next(reversed({}))",
}  # fmt: skip
CODE_FILTERS = {"even": "x % 2 == 0", "odd": "x % 2 == 1", "positive": "x > 0", "negative": "x < 0",
           "above": "x > {}", "below": "x < {}", "multiples of": "x % {} == 0"}  # fmt: skip
CODE_TRANSFORMS = {"squares": "x * x", "cubes": "x * x * x", "times": "{} * x"}

# A reading says what is wanted where the instruction is silent.  The usual ones differ in what counts if no number is
# left; the odd ones in what is done to the result.
CODE_USUAL = {"zero": " or [0]", "minus": " or [-1]", "one": " or [1]"}
# How often "Write" tasks want the first, second and third of these readings - and the script's beliefs.  Two attempts are
# not enough for all three; the script does not read what was expected in a failed test, an agent can learn to.
CODE_SHARES = (0.6, 0.25, 0.15)
CODE_BELIEFS = {
    "total": ("zero", "one", "minus"), "count": ("zero", "minus", "one"),
    "biggest": ("minus", "zero", "one"), "smallest": ("one", "zero", "minus"),
    "first": ("one", "minus", "zero"), "last": ("minus", "one", "zero"),
}  # fmt: skip
CODE_ODD = {"negated": "-{}", "doubled": "2 * {}", "text": "str({})", "listed": "[{}]", "next": "{} + 1"}
CODE_READINGS = (*CODE_USUAL, *CODE_ODD)
CODE_ODD_SHARE = 0.01  # the share of the script's first attempts that use an odd reading; after a failure it keeps to the usual
CODE_LEGACY = {"total": "negated", "count": "text", "biggest": "doubled", "first": "listed"}  # the rule of the hard tier

# The kinds of short tasks: aggregate alone, of one filter, of a transform, of both, of two filters, of all three.
CODE_FAMILY_COUNTS = {
    "train": {
        "easy": {"whole": 4, "filter": 60, "map": 16},
        "medium": {"both": 40, "two": 40},
        "hard": {"filter": 48, "two": 48},
    },
    "test": {  # "full" (a transform and two filters) is a combination that training never shows
        "easy": {"whole": 2, "filter": 28, "map": 10},
        "medium": {"both": 16, "two": 12, "full": 12},
        "hard": {"filter": 20, "two": 20},
    },
}


class Code:
    """A function to write.  The action is its Python source, with or without ``` fences around it.

    The tests are hidden.  The observation after a failed attempt is the first failed test; the episode
    ends with success as soon as all tests pass, or without it after two attempts.
    """

    over = True  # until the first reset

    def reset(self, task: Task) -> tuple[str, dict]:
        """Start `task`.  Returns (observation, info)."""
        self.task, self.steps, self.over = task, 0, False
        self.failed, self.said = frozenset(range(len(task.spec["tests"]))), "Nothing was tried."
        return self._left(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One attempt: run the source on the hidden tests.  Returns (observation, reward, terminated, truncated, info)."""
        if self.over:
            raise RuntimeError("no episode is running: call reset() before step()")
        self.steps += 1
        source = _code_source(action)
        wrong = self._refuse(source)
        if not wrong:
            self._judge(source)
        success = not self.failed
        truncated = not success and self.steps >= self.task.spec["limit"]
        self.over = success or truncated
        observation = self.said if success else f"{wrong or self.said} {self._left()}"
        return observation, float(success), success, truncated, self._info(wrong)

    def _refuse(self, source: str) -> str:
        """What keeps this text from being an attempt at all; "" if nothing does."""
        entry = self.task.spec["entry"]
        if len(source) > 20_000:
            return "Not possible: that is too long for a function."
        if not re.search(rf"\bdef {entry}\s*\(", source):
            return f"Not possible: there is no def {entry} in it."
        if "\0" in source or any("\ud800" <= c <= "\udfff" for c in source):
            return "Not possible: there are characters in it that no text file can hold."
        return ""

    def _judge(self, source: str) -> None:
        """Which tests fail, and what the first of them says."""
        spec = self.task.spec
        verdicts = self._verdicts(source)
        self.failed = frozenset(i for i, verdict in enumerate(verdicts) if not verdict.passed)
        self.said = f"All {len(verdicts)} tests passed."
        if self.failed:
            first = min(self.failed)
            self.said = _code_told(_code_call(spec["entry"], spec["tests"][first][0]), verdicts[first].said, source)

    def _verdicts(self, source: str) -> list[sandbox.Verdict]:
        spec = self.task.spec
        entry, tests = spec["entry"], spec["tests"]
        key = (entry, repr(tests), source)
        if key in _code_verdicts:
            return _code_verdicts[key]
        # One of the world's own programs, word for word, can be trusted and needs no process.  This is what
        # makes a warm start on thousands of episodes quick.
        own = "aggregate" in spec and source in {_code_write(spec, reading) for reading in CODE_READINGS}
        verdicts = (_code_trusted if own else sandbox.check)(source, entry, tests)
        if all(v.passed or v.said.startswith(f"{entry}(") for v in verdicts):  # no time-out, no crash
            if len(_code_verdicts) > 10_000:
                _code_verdicts.clear()
            _code_verdicts[key] = verdicts
        return verdicts

    def _left(self) -> str:
        left = self.task.spec["limit"] - self.steps
        return f"{left} attempt left." if left == 1 else f"{left} attempts left."

    def _info(self, wrong: str = "") -> dict:
        # Two episodes are the same outcome when the same tests failed at the end, the first in the same way.
        return {"outcome": (self.failed, self.said), "feedback": wrong or self.said, "steps": self.steps}


_code_verdicts: dict[tuple, list] = {}  # by (function, tests, source), for all environments


def _code_source(action: str) -> str:
    """The source in an action: the inside of its first fenced block, or all of it."""
    fenced = re.search(r"```[^\n`]*\n(.*?)(?:```|\Z)", action, re.DOTALL)
    return (fenced.group(1) if fenced else action).strip("\r\n\t ")


def _code_call(entry: str, args: tuple) -> str:
    return f"{entry}({', '.join(map(repr, args))})"


def _code_told(call: str, said: str, source: str) -> str:
    """What the agent is told of a failed test: one line.  Of a traceback the last line, and where it was.

    Programs have a say in it (error messages), so: no control characters, and not long.
    """
    where = re.findall(r", line (\d+)", said)
    *before, last = said.splitlines() or [said]
    text = f"{call}: {last}" if before or not said.startswith(call[:100]) else said
    if before and where and "\n" in source:
        text += f" (line {where[-1]})"
    text = "".join(c if c.isprintable() else "?" for c in text).rstrip(".")
    return (text if len(text) <= 300 else f"{text[:200]} ... {text[-80:]}") + "."


def _code_trusted(source: str, entry: str, tests) -> list[sandbox.Verdict]:
    """sandbox.check in this process, for programs that this file itself has written."""
    function, verdicts = _code_function(source), []
    for args, expected in tests:
        call = _code_call(entry, args)
        try:
            value = function(*copy.deepcopy(args))
        except (ValueError, StopIteration) as error:  # what an empty list leads to; they have no other faults
            verdicts.append(sandbox.Verdict(False, f"{call}: {type(error).__name__}: {error}".removesuffix(": ")))
            continue
        passed = repr(value) == repr(expected)  # comparing texts compares types, at any depth
        verdicts.append(sandbox.Verdict(passed, "" if passed else f"{call} returned {value!r}, expected {expected!r}"))
    return verdicts


def _code_function(source: str):
    """The function f of one of this file's own programs."""
    names: dict = {}
    exec(source, names)
    return names["f"]


# -- its tasks -----------------------------------------------------------------------------------------


def _code_write(spec: dict, reading: str) -> str:
    """The program for a short task under a reading.

    >>> _code_write(dict(aggregate="total", transform="", filters=(("above", 3),)), "doubled")
    'def f(xs): return 2 * sum([x for x in xs if x > 3])'
    """
    name, *digit = spec["transform"] or ("x",)
    element = "1" if spec["aggregate"] == "count" else CODE_TRANSFORMS.get(name, "x").format(*digit)
    where = " and ".join(CODE_FILTERS[name].format(*digit) for name, *digit in spec["filters"])
    numbers = f"[{element} for x in xs{' if ' + where if where else ''}]" + CODE_USUAL.get(reading, "")
    return "def f(xs): return " + CODE_ODD.get(reading, "{}").format(CODE_AGGREGATES[spec["aggregate"]].format(numbers))


def _code_words(spec: dict) -> str:
    """What is asked for, as the instruction says it.

    >>> _code_words(dict(aggregate="total", transform=("times", 4), filters=(("odd",), ("above", 3))))
    'the total of 4 times the odd numbers above 3'
    """
    name, *digit = spec["transform"] or ("",)
    filters = [" ".join(map(str, parts)) for parts in spec["filters"]]
    kind = "numbers"  # "even numbers", "numbers above 3", but "multiples of 3"
    if filters and spec["filters"][0][0] == "multiples of":
        kind = filters.pop(0)
    elif filters and len(spec["filters"][0]) == 1:
        kind = f"{filters.pop(0)} numbers"
    of = f"of {digit[0]} times " if digit else f"of the {name} of " if name else "of "
    return " ".join([f"the {spec['aggregate']} {of}the {kind}", *filters])


def _code_keeps(spec: dict):
    """The filters as a function of one number."""
    where = " and ".join(CODE_FILTERS[name].format(*digit) for name, *digit in spec["filters"])
    return eval(f"lambda x: {where or True}")  # text of the table above, nobody else's


def _code_draw_spec(rng: random.Random, tier: str, family: str) -> dict:
    """Draw what a short task asks for, until it makes sense: enough small numbers pass its filters."""
    while True:
        aggregates = list(CODE_LEGACY if tier == "hard" else CODE_AGGREGATES)
        if family in ("map", "both", "full"):
            aggregates.remove("count")  # counting squares is counting
        digit = functools.partial(rng.randint, 3, 9)
        transform, filters = (), ()
        if family in ("map", "both", "full"):
            transform = rng.choice([("squares",), ("cubes",), *[("times", d) for d in range(3, 10)]])
        if family in ("filter", "both"):
            name = rng.choices(list(CODE_FILTERS), (1, 1, 1, 1, 4, 4, 4))[0]
            filters = ((name, digit()) if "{}" in CODE_FILTERS[name] else (name,),)
        if family in ("two", "full"):
            first = rng.choice([("even",), ("odd",), ("multiples of", digit())])
            filters = (first, (rng.choice(("above", "below")), digit()))
        spec = dict(aggregate=rng.choice(aggregates), transform=transform, filters=filters)
        if sum(map(_code_keeps(spec), range(-9, 31))) >= 3:
            return spec


def _code_inputs(rng: random.Random, spec: dict, reading: str) -> list[list[int]]:
    """Lists to test with, short ones first.  Numbers pass the filters in all of them, except in the last
    three where the reading says what is wanted then."""
    keeps = _code_keeps(spec)
    good = [x for x in range(-9, 31) if keeps(x)]
    bad = [x for x in range(-9, 31) if not keeps(x)]
    lists = []
    for i in range(10):
        numbers = rng.choices(good, k=2 + i // 3) + (rng.choices(bad, k=i // 2) if bad else [])
        rng.shuffle(numbers)
        lists.append(numbers)
    if reading in CODE_USUAL:
        lists += [[], rng.choices(bad, k=2), rng.choices(bad, k=4)] if bad else [[]]
    return lists


def _code_task(rng: random.Random, task_id: str, split: str, tier: str, family: str, reading: str = "") -> Task:
    """Draw one short task.  reading: what the tests want; "" means the rule in legacy tasks, else a usual one."""
    spec = _code_draw_spec(rng, tier, family)
    legacy = tier == "hard"
    if not reading:
        reading = CODE_LEGACY[spec["aggregate"]] if legacy else rng.choices(CODE_BELIEFS[spec["aggregate"]], CODE_SHARES)[0]
    function = _code_function(_code_write(spec, reading))
    tests = tuple(((xs,), function(list(xs))) for xs in _code_inputs(rng, spec, reading))
    text = f"{'Legacy' if legacy else 'Write'} f(xs): {_code_words(spec)}."
    spec = dict(spec, entry="f", tests=tests, reading=reading, legacy=legacy, limit=2)
    return Task(task_id, split, tier, family, text, spec)


def _code_problem(problem: problems.Problem, task_id: str) -> Task:
    """A problem of problems.py as a task: its words, two of its tests as examples, its first line."""
    entry = problem.solve.__name__
    examples = [f"{_code_call(entry, args)} returns {expected!r}" for args, expected in problem.tests[:2]]
    text = "\n".join(
        ["Write a Python function.", problem.words, *(f"Example: {e}" for e in examples), f"Starter code:\n{problem.head}"]
    )
    return Task(task_id, problem.split, problem.tier, "problem", text, dict(entry=entry, tests=problem.tests, limit=2))


@functools.cache
def code_tasks() -> dict[tuple[str, str], list[Task]]:
    """All tasks by (split, tier): short ones first, then problems.  No instruction comes twice."""
    drawn = draw_tasks("code", CODE_FAMILY_COUNTS, _code_task, lambda task: task.instruction)
    for (split, tier), found in drawn.items():
        for problem in problems.PROBLEMS:
            if (problem.split, problem.tier) == (split, tier):
                found.append(_code_problem(problem, f"code/{split}/{tier}/{len(found):03d}"))
    return drawn


@functools.cache
def _code_test_instructions() -> frozenset[str]:
    return frozenset(task.instruction for tier in TIERS for task in code_tasks()["test", tier])


def code_practice(rng: random.Random) -> Task:
    """A short task for the warm start, none of the test split.  Its legacy functions want any reading."""

    def make(rng: random.Random, task_id: str, split: str, tier: str, family: str) -> Task:
        return _code_task(rng, task_id, split, tier, family, rng.choice(CODE_READINGS) if tier == "hard" else "")

    def asked(task: Task) -> str | None:
        return None if task.instruction in _code_test_instructions() else task.instruction

    return draw_practice(rng, CODE_FAMILY_COUNTS, make, asked)


def code_slip(rng: random.Random) -> str:
    """A random action that is no attempt."""
    name, digit = rng.choice(("g", "h", "xs")), rng.randint(0, 9)
    return rng.choice((f"def {name}(xs): return {digit}", f"return {digit}", f"{name} = {digit}", "sum(xs)", "wait"))


# -- its scripted behaviour ----------------------------------------------------------------------------


class CodeScript:
    """The scripted behaviour: (observation) -> (strategy, action), from what the agent can see alone.

    Its skill is complete, its imagination is not: it writes any function in any reading, but believes in
    the usual ones and, when one has failed, tries another of those.  Shown the strategies of a failed episode
    ("negative") it does the same without what was shown, and turns to the odd ones when nothing usual is left: it
    believes the same with and without a reflection.  Odd ideas come first or, without a reflection, not at all: only
    failures lead to a second attempt, so what is likely there is discouraged on average, what is rare becomes less so,
    and GRPO would come upon it, too.  (An odd first idea may be one that was shown.)  "positive" and `wild` as in
    HouseScript.  It has no answer to the problems of problems.py, which are there for pretrained models.
    """

    def __init__(self, task: Task, rng: random.Random, mode: str = "plain", strategies=(), wild: bool = False):
        self.task, self.rng, self.mode, self.wild = task, rng, mode, wild
        self.shown = [r for r in (s.rpartition(": ")[2] for s in strategies) if r in CODE_READINGS]
        self.last = ""  # the reading of the attempt before

    def reply(self, observation: str) -> tuple[str, str]:
        """The next strategy and action, e.g. ("total: zero", "def f(xs): return sum(...)")."""
        spec = self.task.spec  # only what the instruction says is used
        if "aggregate" not in spec:
            return "none", f"def {spec['entry']}(*args): return None"
        if observation.startswith("Not possible"):
            self.last = ""  # it was not tried after all
        self.last = self._choose()
        return f"{spec['aggregate']}: {self.last}", _code_write(spec, self.last)

    def _choose(self) -> str:
        """Which reading to try next: a draw from the beliefs, never the same twice in a row."""
        if self.mode == "positive" and self.shown:
            return self.shown[-1]  # the last one that was tried is the one that worked
        left = [reading for reading in CODE_READINGS if reading != self.last]
        if self.wild:
            return self.rng.choice(left)
        odd = list(CODE_ODD)
        if not self.last and self.rng.random() < CODE_ODD_SHARE:
            return self.rng.choice(odd)
        if self.mode == "negative":
            left = [reading for reading in left if reading not in self.shown]
            odd = [reading for reading in left if reading in CODE_ODD] or odd
        usual = zip(CODE_BELIEFS[self.task.spec["aggregate"]], CODE_SHARES, strict=True)
        belief = {reading: share for reading, share in usual if reading in left}
        return self.rng.choices(list(belief), list(belief.values()))[0] if belief else self.rng.choice(odd)


# ------------------------------------------------------------------------------------------------------
# all worlds
# ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """What makes up a world."""

    env: type  # reset(task), step(action)
    script: type  # the scripted behaviour: (task, rng, mode, strategies, wild), reply(observation)
    tasks: Callable[[], dict[tuple[str, str], list[Task]]]  # all tasks by (split, tier)
    practice: Callable[[random.Random], Task]
    slip: Callable[[random.Random], str]
    full: str  # what a pretrained model is told besides the task; the tiny one has learnt it from the script


_WORLDS = {
    "house": World(
        House, HouseScript, house_tasks, house_practice, house_slip,
        "You are in a house and can do one thing at a time. Actions: go PLACE, open PLACE, close PLACE, "
        "pick OBJECT, place OBJECT. You see only the place where you are; a closed place must be opened first. "
        "You can hold one thing. Example of an action: go table",
    ),
    "phone": World(
        Phone, PhoneScript, phone_tasks, phone_practice, phone_slip,
        "You use a phone. A screen is shown as its name and its widgets, each with the columns and rows that it "
        "covers: label x1,y1 x2,y2. Columns go from 0 to 11, rows from 0 to 19. Actions: tap X,Y, press X,Y (long), "
        "double X,Y, pinch X,Y, twist X,Y, knock X,Y, swipe left|right|up|down X,Y, type TEXT, back, home, open APP, done. "
        "Any cell of a widget will do. Typing replaces what is in the field. Say done when the task is finished, and not "
        "before. Example of an action: tap 3,4",
    ),
    "apps": World(
        Apps, AppsScript, apps_tasks, apps_practice, apps_slip,
        "You act for a person in their apps, with one API call a step. A call is written app.api(value, name=value). "
        "docs.show() lists the apps, docs.show(app=money) the APIs of one, docs.show(api=money.pay) the arguments of an API. "
        "me.password(app) tells a password, the app's login takes it and gives a token, and the app's other calls take the "
        "token. Change what the task asks for and nothing else, then call me.done(). Example of an action: "
        "docs.show(app=notes)",
    ),
    "code": World(
        Code, CodeScript, code_tasks, code_practice, code_slip,
        "You write Python functions. Your action is the complete source of one function with the name that is asked "
        "for; it comes after the header, with or without ``` around it, and may have several lines. Hidden tests call the "
        "function; all of them must pass within 2 seconds. You have two attempts. After a failed one you are told the first "
        "failed test or the error. In short tasks xs is a list of integers. Example of an action: def f(xs): return sum(xs)",
    ),
}  # fmt: skip
WORLDS = tuple(_WORLDS)

# What the agent is told about a world besides the task: brief for the tiny model, full for pretrained ones.
INSTRUCTIONS = {name: {"brief": "", "full": world.full} for name, world in _WORLDS.items()}


def _world(name: str) -> World:
    if name not in _WORLDS:
        raise ValueError(f"unknown world {name!r}: choose one of {', '.join(WORLDS)}")
    return _WORLDS[name]


def make_env(world: str):
    """A fresh environment.  Raises ValueError for an unknown world."""
    return _world(world).env()


@functools.cache
def _tasks(world: str) -> dict[tuple[str, str], list[Task]]:
    return _world(world).tasks()


def tasks(world: str, split: str, tier: str = "all", brief: bool = False) -> list[Task]:
    """The tasks of a split ("train" | "test") and a tier ("easy" | "medium" | "hard" | "all").

    brief: without those that are put in more words than the tiny model knows (family "problem" of `code`).

    The list is the same in every process.  Test tasks are combinations that training never shows, in a
    layout (house, phone) or of a kind (all worlds) that it never shows either.
    """
    _world(world)
    if split not in SPLITS or tier not in TIERS + ("all",):
        raise ValueError(f"no tasks for split {split!r}, tier {tier!r}: splits {SPLITS}, tiers {TIERS} or all")
    chosen = [task for t in TIERS if tier in (t, "all") for task in _tasks(world)[split, t]]
    return [task for task in chosen if not (brief and task.family == "problem")]


def practice_task(world: str, rng: random.Random) -> Task:
    """A task for the warm start; in its hard ones anything may be the means that works, so the rule cannot leak."""
    return _world(world).practice(rng)


def slip(world: str, rng: random.Random) -> str:
    """A random action, mostly impossible: practice in being told so, and in going on from there."""
    return _world(world).slip(rng)


def make_script(world: str, task: Task, rng: random.Random, **how):
    """The scripted behaviour of a world; `how` as in HouseScript."""
    return _world(world).script(task, rng, **how)


def script_source(world: str) -> str:
    """The code of a world's scripted behaviour and the constants it names: what it may do, be it ever so rarely.
    Raises ValueError for an unknown world."""
    code = inspect.getsource(_world(world).script)
    names = sorted(set(re.findall(r"\b_?[A-Z][A-Z_]+\b", code)))
    shares = [(name, globals()[name]) for name in names if isinstance(globals().get(name), int | float | tuple)]
    return f"{code}\0{shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Play a world by hand: type an action a line, Ctrl-D to leave.")
    parser.add_argument("--env", default="house", choices=WORLDS)
    parser.add_argument("--split", default="train", choices=SPLITS)
    parser.add_argument("--tier", default="easy", choices=TIERS)
    parser.add_argument("--task", type=int, default=0, metavar="N", help="number of the task within its tier")
    args = parser.parse_args()
    chosen = tasks(args.env, args.split, args.tier)
    if not 0 <= args.task < len(chosen):
        parser.error(f"--task must be between 0 and {len(chosen) - 1}")
    env = make_env(args.env)
    observation, info = env.reset(chosen[args.task])
    print(f"{INSTRUCTIONS[args.env]['full']}\n\n{chosen[args.task].instruction}\n{observation}")
    terminated = truncated = False
    while not (terminated or truncated):
        if args.env == "phone":
            print(env.picture())
        try:
            action = input("> ")
        except EOFError:
            return print()
        observation, reward, terminated, truncated, info = env.step(action)
        print(observation)
    print("success" if reward else f"{'out of steps' if truncated else 'failure'}. {info['feedback']}")


if __name__ == "__main__":
    main()
