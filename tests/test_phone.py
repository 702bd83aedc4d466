"""The phone, besides what test_envs.py tests in every world: screens, the hard rule, the dropdown, what counts as success."""

import copy
import functools
import random
from collections import Counter

import pytest

import envs as world
import oracles
from envs import PHONE_MEANS, PHONE_ODD, Phone, PhoneScript
from oracles import PhoneOracle, phone_plan, state

follow = functools.partial(oracles.follow, "phone")
TASKS = {s: {t: tasks for (split, t), tasks in world.phone_tasks().items() if split == s} for s in world.SPLITS}
EVERY = [task for tiers in TASKS.values() for tasks in tiers.values() for task in tasks]


def acts(task, actions):
    """An environment after these actions, and what it answered to the last one."""
    steps, env = oracles.play("phone", task, actions)
    return env, steps[-1]


def branch(env):
    """The same phone once more, to try something on."""
    twin = copy.copy(env)
    twin.data, twin.tried = copy.deepcopy(env.data), set(env.tried)
    return twin


def first(family, tier="easy", split="train", **of_spec):
    return next(t for t in TASKS[split][tier] if t.family == family and all(t.spec[k] == v for k, v in of_spec.items()))


# -- tasks -------------------------------------------------------------------------------------------------


def test_tests_show_a_layout_style_that_training_and_practice_never_show():
    styles = {split: {t.spec["style"] for t in EVERY if t.split == split} for split in world.SPLITS}
    assert styles == {split: set(names) for split, names in world.PHONE_STYLES.items()} and not styles["train"] & styles["test"]
    assert {world.phone_practice(random.Random(n)).spec["style"] for n in range(200)} == styles["train"]


def test_boxes_lie_on_the_grid_have_several_cells_and_do_not_overlap():
    for task in EVERY:
        for boxes in task.spec["boxes"].values():
            assert all(0 <= a < c < world.PHONE_WIDTH and 0 <= b < d < world.PHONE_HEIGHT for a, b, c, d in boxes)
            cells = [(x, y) for a, b, c, d in boxes for x in range(a, c + 1) for y in range(b, d + 1)]
            assert len(set(cells)) == len(cells) and len(boxes) == 5


# -- the hard rule -------------------------------------------------------------------------------------------


def test_on_every_beta_phone_the_same_odd_means_works_which_is_usual_nowhere():
    usual = {means for usual, _ in PHONE_MEANS.values() for means in usual}
    odd = {category: means for category, (_, means) in PHONE_MEANS.items()}
    assert not usual & set(PHONE_ODD) and set(odd.values()) <= set(PHONE_ODD) and len(set(odd.values())) == len(odd)
    for task in EVERY:
        hard = task.tier == "hard"
        assert task.instruction.startswith("Beta phone: " if hard else "Phone: ")
        assert (task.spec["works"] == odd) if hard else all(m in usual - {"name"} for m in task.spec["works"].values())


def test_there_is_room_for_three_wrong_tries_on_a_beta_phone_and_for_all_usual_ones_elsewhere():
    for task in EVERY:
        hard = task.tier == "hard"
        steps, reward = follow(task, PhoneOracle(task, random.Random(0), 3 if hard else 2))
        assert reward == 1.0 and not any(o.startswith("Not possible") for *_, o in steps), (task, steps)
        failed = sum(o.startswith("Nothing happens. ") for *_, o in steps)  # a failed try shows at once
        categories = {c for kind in task.family.split("+") for c in world.PHONE_GOALS[kind][0]}
        categories -= {"new"} if task.spec["start"][0] == "form" else set()
        assert failed == (3 * bool(categories) if hard else 2 * len(categories)), task


def test_the_warm_start_cannot_learn_the_hard_rule():
    """design.md 6: on practice phones called Beta any means may work, and the demonstrator does not favour the odd one."""
    rng, works, n = random.Random(0), Counter(), 0
    tried: Counter = Counter()
    for _ in range(3000):
        task = world.phone_practice(rng)
        if task.tier == "hard":
            n += 1
            works.update(task.spec["works"].items())
            tried.update((c, PhoneScript(task, rng)._choose(c, "")) for c in PHONE_MEANS)
    for category, (usual, odd) in PHONE_MEANS.items():
        expected = n / (len(set(usual) - {"name"}) + len(PHONE_ODD))
        assert abs(works[category, odd] - expected) < 4 * expected**0.5
        assert tried[category, odd] / n < 0.01
        for mode, shown, among in (
            ("negative", usual, PHONE_ODD),
            ("positive", (usual[0], odd), (odd,)),
            ("negative", PHONE_ODD + usual[:2], usual[2:]),
        ):
            script = PhoneScript(task, rng, mode, [f"delete note a.md: try {means}" for means in shown])
            assert {script._choose(category, "delete note a.md:") for _ in range(200)} == set(among)


# -- what counts as success ----------------------------------------------------------------------------------


def test_done_in_a_wrong_state_ends_the_episode_as_a_failure():
    for task in EVERY[::7]:
        env, (_, reward, terminated, truncated, info) = acts(task, ["done"])
        assert (reward, terminated, truncated) == (0.0, True, False) and info["feedback"] == "Nothing was changed."
        with pytest.raises(RuntimeError, match="reset"):
            env.step("done")


def test_the_right_state_without_done_is_no_success():
    """paper.md 7.2: running out of budget fails even with the right state."""
    for task in EVERY[::3]:
        *plan, done = phone_plan(task)
        waits = ["press 0 0 0"] * (task.spec["limit"] - len(plan))
        _, (_, reward, terminated, truncated, info) = acts(task, plan + waits)
        assert (reward, terminated, truncated) == (0.0, False, True) and info["feedback"] == "Done was never said."
        _, last = acts(task, waits[1:] + plan + [done])  # H73: success on the very last step counts
        assert last[1:4] == (1.0, True, False) and last[4]["feedback"] == "" and done == "done"


def test_any_other_change_spoils_success():
    """AndroidWorld and AppWorld judge the state, collateral damage included."""
    for task in EVERY[::3]:
        *plan, _ = phone_plan(task)
        env, _ = acts(task, plan)
        for app in world.PHONE_APPS:
            spoilt = branch(env)
            spoilt.over = False
            spoilt.data[app]["extra"] = "on"
            _, reward, terminated, _, info = spoilt.step("done")
            assert (reward, terminated) == (0.0, True) and info["feedback"] == "The goal was not reached."


def test_an_app_that_has_to_be_open_at_the_end_must_be():
    for task in [t for t in TASKS["test"]["medium"] if t.family == "turn+open"]:
        *plan, _ = phone_plan(task)
        assert acts(task, [*plan, "done"])[1][1] == 1.0
        assert acts(task, [*plan[:-1], "home", "done"])[1][1] == 0.0


def corner(env, kind):
    """A cell of the first widget of a kind."""
    return next(f"{box[1]} {box[4]}" for widget, box in zip(env._widgets(), env.draw(), strict=True) if widget[1] == kind)


@pytest.mark.parametrize("tier", ["easy", "hard"])
def test_a_notes_type_is_changed_by_its_dropdown_alone(tier):
    """paper.md 7.2: typing ".txt" into the name leaves the extension .md."""
    for task in (t for split in TASKS for t in TASKS[split][tier] if t.family == "file"):
        (_, _, name, _), works = task.spec["goals"][0], task.spec["works"]["type"]
        env, _ = acts(task, [f"type {name}"])
        assert env.draw()[1][0] == "md"
        save = f"tap {corner(env, 'save')}"
        env.step(save)
        assert f"{name}.md" in env.data["notes"] and name not in env.data["notes"] and env.step("done")[1] == 0.0

        env, _ = acts(task, [f"type {name[:-4]}"])
        env.step(f"{works} {corner(env, 'type')}")
        assert env.title() == "types"
        env.step(f"tap {corner(env, 'choice')}")  # md, the first of them
        assert env.draw()[1][0] == "md"
        env.step(f"{works} {corner(env, 'type')}")
        env.step(f"tap {env.draw()[1][1]} {env.draw()[1][2]}")  # txt; the name is still there
        assert [label for label, *_ in env.draw()] == [name[:-4], "txt", "save"]
        env.step(save)
        assert env.step("done")[1] == 1.0 and name in env.data["notes"]


# -- screens and actions -------------------------------------------------------------------------------------


def test_there_are_enough_apps_and_screens_of_at_most_five_widgets():
    screens, cells = set(), 0
    for task in EVERY[::12]:
        rng, env, longer = random.Random(task.id), Phone(), copy.deepcopy(task)
        longer.spec["limit"] = 60
        env.reset(longer)
        while not env.over:
            screens.add(env.title().replace(env.screen[2] or "*", "X"))
            assert 1 <= len(env._widgets()) == len(env.draw()) <= 5
            lines = env.picture().splitlines()
            assert len(lines) == 21 and {len(line) for line in lines[1:]} == {3 * 12 + 4}
            label, x1, y1, x2, y2 = rng.choice(env.draw())
            means = rng.choice(["tap", *task.spec["works"].values()])
            after = []
            for x, y in ((x1, y1), (x2, y2), (rng.randint(x1, x2), rng.randint(y1, y2))):  # any cell of it is a hit
                twin = branch(env)
                after.append((twin.step(f"{means} {x} {y}")[0], state(twin)))
                cells += 1
            assert after[0] == after[1] == after[2]
            env.step(rng.choice([f"{means} {x1} {y1}", f"{means} {x1} {y1}", "back", "type tea"]))
    assert len(screens) >= 12 and len(world.PHONE_APPS) >= 5, screens
    assert cells > 1000


def test_back_home_and_open_lead_where_they_say():
    task = first("create", works={**first("create").spec["works"], "new": "tap"})
    env, _ = acts(task, ["open notes"])
    env.step(f"tap {corner(env, 'new')}")
    titles = [env.title()]
    for action in ("back", "back", "home", "open clock", "open clock"):
        observation = env.step(action)[0]
        titles.append(env.title())
        assert observation.startswith("Nothing happens. ") == (titles[-1] == titles[-2])
    assert titles == ["new note", "notes", "home", "home", "clock", "clock"]


@pytest.mark.parametrize(
    "text", ["tap 3 4", "TAP  3 4.", "tap(3, 4)", "Tap (3,4).", '"tap 3 4"', "`tap(3, 4)`", " tap\n3 4 \r\n", "tap at 3 4"]
)
def test_case_space_quotes_a_full_stop_and_the_call_form_do_not_matter(text):
    """H82: parser and prompt drift apart; variants by a stated rule (Phone._act)."""
    task = copy.deepcopy(first("delete"))
    task.spec["boxes"]["home"] = [(0, 4 * i, 3, 4 * i) for i in range(5)]
    env, _ = acts(task, [text])
    assert env.title() == "contacts"


@pytest.mark.parametrize(
    "text, works",
    [("done", True), ("Done()", True), ("done.", True), ("done ( )", True), ("open(notes)", True), ("open the notes", True),
     ("home()", True), ("swipe left", True), ("swipe(up, 3, 4)", True), ("swipe left at 3 4", True), ("knock 0 0", True),
     ("done now", False), ("not done", False), ("done; tap 3 4", False), ("open", False), ("open notes now", False),
     ("tap 3", False), ("tap 3 4 5", False), ("tap -1 4", False), ("tap 3.5 4", False), ("tap x y", False),
     ("tap 12 0", False), ("tap 0 20", False), ("tap ٣ 4", False), ("swipe sideways", False), ("swipe", False),
     ("swipe left 3", False), ("tap(3, 4", False), ('{"tap": [3, 4]}', False), ("type", False), ("type tea", False)],
)  # fmt: skip
def test_whatever_else_is_in_an_action_makes_it_none(text, works):
    """H75, H78: lenient parsing runs something that was not asked for."""
    assert acts(first("delete"), [text])[1][0].startswith("Not possible: ") is not works


@pytest.mark.parametrize("text", ["type tea", 'type "tea"', "type('tea')", "TYPE Tea.", "type   tea "])
def test_what_is_typed_replaces_what_the_field_holds(text):
    env, _ = acts(first("file"), ["type milk", text])
    assert env.text == "tea"
    for wrong in ("type " + "x" * 21, "type <|im_end|>", "type tea\nmilk", "type ''", "type 茶"):
        assert env.step(wrong)[0].startswith("Not possible: ") and env.text == "tea"
        env.steps = 0


def test_a_list_that_is_full_and_a_name_that_is_taken_are_refused():
    task = copy.deepcopy(first("file"))
    task.spec["limit"] = 99
    env, _ = acts(task, [f"type {next(iter(task.spec['data']['notes'])).partition('.')[0]}"])
    save = f"tap {corner(env, 'save')}"
    env.type = next(iter(task.spec["data"]["notes"])).partition(".")[2]
    assert env.step(save)[0].startswith("Nothing happens. ")
    env.step("type kiwi")
    env.data["notes"]["fourth.md"] = ""
    assert env.step(save)[0].startswith("Not possible: the list is full. ")


# -- episodes ------------------------------------------------------------------------------------------------


def test_the_outcome_is_what_was_tried_what_changed_and_whether_done_was_said():
    task = first("delete", "hard")
    _, app, name, _ = task.spec["goals"][0]
    env, _ = acts(task, [f"open {app}"])
    press = f"press {corner(env, 'item')}"
    (x1, y1, x2, y2) = env.draw()[0][1:]
    other = f"press {x1} {y1}" if press != f"press {x1} {y1}" else f"press {x2} {y2}"
    outcomes = [acts(task, [f"open {app}", action])[1][4]["outcome"] for action in (press, other)]
    assert outcomes[0] == outcomes[1] == ((("item", "press"),), (), False)  # another cell is no other outcome
    info = acts(task, phone_plan(task))[1][4]
    odd = PHONE_MEANS["item"][1]
    assert info["outcome"] == ((("item", odd),), ((app, name, None),), True)


def test_the_instructions_name_every_gesture():
    """H82.  (That the example is an action, test_envs.py checks.)"""
    full = world.INSTRUCTIONS["phone"]["full"]
    assert all(f"{means} X,Y" in full for means in world.PHONE_POINTS) and "swipe left|right|up|down X,Y" in full
