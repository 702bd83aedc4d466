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

So far there is one world, `house`, after LangR (LLaRP), the embodied domain of the paper (SGE 4.1).
How it differs from the original:
  1. Ten receptacles and 24 objects instead of 16 and 28; 6 to 14 steps instead of 32.
  2. Every task comes from a seeded generator; the original's scenes and data set are not needed.
  3. Houses are *tidy* or *messy*, and the text says which.  In a tidy house things are where people
     keep them.  In a messy one every category is in ONE particular odd place - the same in every messy
     house, but nobody tells the agent.  Those are the hard tasks: easy to carry out, hard to think of.

Each world also has a *scripted behaviour* (`HouseScript`), from which the tiny base model learns to
speak (policy.py).  It sees only what the agent sees.  It carries out any strategy correctly but has
firm beliefs about where things are; it stands in for a pretrained model, which likewise can do a lot
more than it thinks of.

Try it:  python envs.py --env house              play a task by hand
         python envs.py --env house --tier hard  ... a hard one
"""

import argparse
import random
import re
from dataclasses import dataclass, field

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


# ------------------------------------------------------------------------------------------------------
# house
# ------------------------------------------------------------------------------------------------------

OPEN_PLACES = ("counter", "sink", "table", "sofa", "desk", "bed")
CLOSED_PLACES = ("fridge", "cabinet", "drawer", "chest")  # must be opened before one sees or takes anything
PLACES = OPEN_PLACES + CLOSED_PLACES

# category -> (objects, the three usual places from most to least usual, the odd place of messy houses)
CATEGORIES = {
    "fruit": (("apple", "pear", "lemon", "plum", "peach", "banana"), ("counter", "fridge", "table"), "desk"),
    "dish": (("plate", "bowl", "cup", "spoon", "fork", "mug"), ("cabinet", "sink", "counter"), "sofa"),
    "tool": (("hammer", "wrench", "drill", "saw", "clamp", "pliers"), ("chest", "drawer", "desk"), "fridge"),
    "toy": (("ball", "lego", "cube", "doll", "kite", "robot"), ("bed", "sofa", "chest"), "sink"),
}
OBJECTS = tuple(o for objects, _, _ in CATEGORIES.values() for o in objects)
CATEGORY_OF = {o: c for c, (objects, _, _) in CATEGORIES.items() for o in objects}

USUAL = (0.75, 0.2, 0.05)  # how often things of a tidy house are in the three usual places - and the script's beliefs
ODD = 0.006  # the share of the script's searches that go anywhere else

# A layout is the set of places that a house has; each has all the odd places.  The last one is for test tasks only.
LAYOUTS = {
    "train": (
        ("counter", "sink", "table", "sofa", "desk", "bed", "fridge", "cabinet", "chest"),
        ("sink", "table", "sofa", "desk", "bed", "chest", "drawer", "fridge", "cabinet"),
        ("bed", "desk", "sofa", "sink", "counter", "cabinet", "chest", "fridge", "drawer"),
        ("table", "counter", "desk", "bed", "sofa", "fridge", "drawer", "chest", "cabinet", "sink"),
    ),
    "test": (("desk", "sofa", "chest", "sink", "fridge", "bed", "counter", "cabinet"),),
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


def _combination(task: Task) -> tuple:
    """What makes a test task unseen: no training task of its tier asks for the same thing."""
    return (task.tier, task.family, tuple(task.spec["goals"]))


def _house_tasks(split: str, tier: str, seen: set) -> list[Task]:
    rng = random.Random(f"house/{split}/{tier}")  # a string seed: the same under every PYTHONHASHSEED
    tasks = []
    for family, count in FAMILY_COUNTS[split][tier].items():
        while count:
            name = f"house/{split}/{tier}/{len(tasks):03d}"
            task = _house_task(rng, name, split, tier, family, "messy" if tier == "hard" else "tidy")
            if _combination(task) in seen or any(_holds_at_start(task, goal) for goal in task.spec["goals"]):
                continue
            seen.add(_combination(task))
            tasks.append(task)
            count -= 1
    return tasks


def _holds_at_start(task: Task, goal: tuple) -> bool:
    env = House()
    env.reset(task)
    return env._holds(goal)


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
# all worlds
# ------------------------------------------------------------------------------------------------------

WORLDS = ("house",)

# What the agent is told about a world besides the task.  The brief form is for the tiny model, which
# has learnt the actions from the scripted behaviour; the full form is for pretrained models.
INSTRUCTIONS = {
    "house": {
        "brief": "",
        "full": "You are in a house and can do one thing at a time. Actions: go PLACE, open PLACE, close PLACE, "
        "pick OBJECT, place OBJECT. You see only the place where you are; a closed place must be opened first. "
        "You can hold one thing. Example of an action: go table",
    },
}


def make_env(world: str) -> House:
    """A fresh environment.  Raises ValueError for an unknown world."""
    if world not in WORLDS:
        raise ValueError(f"unknown world {world!r}: choose one of {', '.join(WORLDS)}")
    return House()


def tasks(world: str, split: str, tier: str = "all") -> list[Task]:
    """The tasks of a split ("train" | "test") and a tier ("easy" | "medium" | "hard" | "all").

    The list is the same in every process.  No test task shares its combination of instruction, objects
    and destination with a training task, and all of them play in a layout that training never shows.
    """
    make_env(world)
    if split not in SPLITS or tier not in TIERS + ("all",):
        raise ValueError(f"no tasks for split {split!r}, tier {tier!r}: splits {SPLITS}, tiers {TIERS} or all")
    seen: set = set()
    drawn = {(s, t): _house_tasks(s, t, seen) for s in SPLITS for t in TIERS}  # train first, test avoids it
    return [task for t in TIERS if tier in (t, "all") for task in drawn[split, t]]


def practice_task(world: str, rng: random.Random) -> Task:
    """A task for the warm start.  In its messy houses things are anywhere, so the rule cannot leak."""
    make_env(world)
    tier = rng.choices(TIERS, (4, 2, 3))[0]
    families = FAMILY_COUNTS["train"][tier]
    while True:
        family = rng.choices(list(families), list(families.values()))[0]
        task = _house_task(rng, "practice", "practice", tier, family, "anywhere" if tier == "hard" else "tidy")
        if not any(_holds_at_start(task, goal) for goal in task.spec["goals"]):
            return task


def slip(world: str, rng: random.Random) -> str:
    """A random action, mostly impossible: practice in being told so, and in going on from there."""
    make_env(world)
    return f"{rng.choice(House.ACTIONS)} {rng.choice(rng.choice((PLACES, OBJECTS)))}"


def make_script(world: str, task: Task, rng: random.Random, **how) -> HouseScript:
    """The scripted behaviour of a world; `how` as in HouseScript."""
    make_env(world)
    return HouseScript(task, rng, **how)


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
        try:
            action = input("> ")
        except EOFError:
            return print()
        observation, reward, terminated, truncated, info = env.step(action)
        print(observation)
    print("success" if terminated else f"out of steps. {info['feedback']}")


if __name__ == "__main__":
    main()
