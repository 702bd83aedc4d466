"""The world `apps`, besides what test_envs.py tests in every world: the hard rule, calls and errors, success needs exactly
the goal."""

import functools
import random
import re
from collections import Counter

import envs as apps
import oracles
from envs import Task
from oracles import apps_plan

play = functools.partial(oracles.play, "apps")
TASKS = apps.apps_tasks()
ALL = [task for tasks in TASKS.values() for task in tasks]
REQUESTS = apps._APPS_REQUESTS


def play_script(task, rng, **how):
    """[(strategy, action, observation), ...] and the last reward."""
    return oracles.follow("apps", task, apps.AppsScript(task, rng, **how))


def task_of(family, split="train"):
    return next(t for t in ALL if t.family == family and t.split == split and t.tier != "hard")


# -- the hard rule ---------------------------------------------------------------------------------------


def test_the_rule_of_old_accounts_holds_and_is_never_usual():
    desks = {kind: f"via {row[4]}" for kind, row in REQUESTS.items()}
    assert len(set(desks.values())) == len(desks)
    for task in ALL:
        old = task.tier == "hard"
        assert task.instruction.startswith("Old account. " if old else "Account. ") and task.spec["old"] == old
        for kind, works in task.spec["works"].items():
            assert works == desks[kind] if old else works in [f"by {way}" for way in REQUESTS[kind][3]]
            assert f"{desks[kind].split()[1]}.ask" in apps._APPS_APIS
        if not old:  # the odd desks belong to apps that no other task has to do with
            assert not {f"via {app}" for app in task.spec["open"]} & set(desks.values())
            assert not any(f" {desk.split()[1]}" in task.instruction for desk in desks.values())


def test_for_old_accounts_every_other_way_and_desk_is_refused_at_once_and_changes_nothing():
    for task in TASKS["train", "hard"][::6] + TASKS["test", "hard"][::6]:
        (kind, first, second), works = task.spec["jobs"][0], task.spec["works"][task.family]
        app = REQUESTS[kind][0]
        for means in apps._apps_means(kind):
            how, name = means.split()
            call = f"{app}.{kind}({task.spec['tokens'][app]}, {first}, {second}, {name})"
            [(observation, *_, info)], env = play(task, [call if how == "by" else f"{name}.ask({kind} {first} {second})"])
            assert (env.tables != task.spec["tables"]) == (means == works) == observation.startswith("Saved"), means
            if means != works:
                told = "Refused: not available for this account." if how == "by" else "Accepted, but nothing happens."
                assert observation == told and info["outcome"] == ((means,), (), False)


def test_a_script_that_thinks_of_the_right_desk_solves_every_hard_task_with_room_for_four_wrong_choices():
    for task in TASKS["train", "hard"] + TASKS["test", "hard"]:
        shown = [f"{task.instruction}: {task.spec['works'][task.family]}"]
        steps, reward = play_script(task, random.Random(0), mode="positive", strategies=shown)
        assert reward == 1 and len(steps) + 4 <= task.spec["limit"]


def test_the_warm_start_cannot_learn_the_hard_rule():
    """design.md 6: in practice anything may work for an old account, so the right desk comes up by chance only."""
    rng, works, first, n = random.Random(0), Counter(), Counter(), Counter()
    for _ in range(3000):
        task = apps.apps_practice(rng)
        if task.tier == "hard":
            desk = f"via {REQUESTS[task.family][4]}"
            n[task.family] += 1
            works[task.family] += task.spec["works"][task.family] == desk
            first[play_script(task, rng)[0][0][0].endswith(desk)] += 1
    for family, count in n.items():
        assert count > 150 and abs(works[family] - count / 11) < 4 * (count / 11) ** 0.5, family
    assert first[True] / first.total() < 0.008  # and its demonstrator does not think of it


def test_reflection_turns_to_what_was_not_shown_or_does_the_same_again():
    for task in TASKS["train", "hard"][::8]:
        means = apps._apps_means(task.family)
        shown = [f"goal: {m}" for m in means[:9]]
        for seed in range(5):
            for mode, allowed in (("negative", means[9:]), ("positive", means[8:9])):
                script = apps.AppsScript(task, random.Random(seed), mode=mode, strategies=shown)
                strategy, _ = script.reply(apps.Apps().reset(task)[0])
                assert strategy.split(": ")[1] in allowed


# -- rewards and ends ------------------------------------------------------------------------------------


def test_feedback_says_whether_all_is_done():
    for task in ALL[::10]:
        *plan, done = apps_plan(task)
        assert play(task, [*plan, done])[0][-1][4]["feedback"] == "The task was done."
        assert play(task, plan)[0][-1][4]["feedback"] == "Only me.done() was missing."


def test_success_needs_the_change_and_nothing_else():
    """AppWorld's "no collateral damage": done too early, done with half, or done with anything more, is a failure."""
    for task in ALL[::3]:
        *plan, done = apps_plan(task)
        job = apps._apps_label(task.spec["jobs"][0])
        [(_, *end, info)] = play(task, [done])[0]
        assert end == [0.0, True, False] and info["feedback"] == f"Never happened: {job}."
        if len(task.spec["jobs"]) == 2:
            assert play(task, [*plan[:-1], done])[0][-1][1:3] == (0.0, True)
        extra = next(i for i in task.spec["tables"]["news"])
        token = task.spec["tokens"]["news"]
        login = f"news.login({task.spec['passwords']['news']})"
        for more in ([f"news.add({token}, tea)"], [f"news.delete({token}, {extra})"], plan[-1:]):
            roomy = Task(task.id, task.split, task.tier, task.family, task.instruction, {**task.spec, "limit": 20})
            steps, env = play(roomy, [login, *plan, *more, done])
            same = steps[-2][0].startswith("Not possible")  # what is deleted already cannot be deleted again
            assert steps[-1][1:4] == (float(same), True, False), (task, more)
            assert same or steps[-1][4]["feedback"] == "Something else was changed too."


def test_a_wrong_change_that_was_undone_does_not_count():
    task = task_of("add")
    app, token = task.spec["jobs"][0][2], task.spec["tokens"][task.spec["jobs"][0][2]]
    roomy = Task(task.id, task.split, task.tier, task.family, task.instruction, {**task.spec, "limit": 20})
    free = next(i for i in "123456789" if i not in task.spec["tables"][app])
    *plan, done = apps_plan(task)
    login = f"{app}.login({task.spec['passwords'][app]})"
    steps, _ = play(roomy, [login, f"{app}.add({token}, oops)", f"{app}.delete({token}, {free})", *plan, done])
    assert steps[1][0] == f"Saved in {app}: oops." and steps[-1][1] == 1.0


def test_the_outcome_is_what_was_tried_what_changed_and_how_it_ended():
    task = TASKS["train", "hard"][0]
    kind, first, second = task.spec["jobs"][0]
    ask = f"ask({kind} {first} {second})"
    ended = {name: play(task, calls)[0][-1][4]["outcome"] for name, calls in {
        "two": [f"notes.{ask}", f"files.{ask}"], "order": [f"files.{ask}", "docs.show()", f"notes.{ask}"],
        "one": [f"notes.{ask}"], "done": [f"notes.{ask}", "me.done()"], "solved": apps_plan(task),
    }.items()}  # fmt: skip
    assert ended["two"] == ended["order"] == (("via files", "via notes"), (), False)
    assert len({ended[name] for name in ("two", "one", "done", "solved")}) == 4
    works = task.spec["works"][kind]
    assert ended["solved"] == ((works,), (f"{REQUESTS[kind][0]} +{first} {second}",), True)


# -- calls ------------------------------------------------------------------------------------------------


def test_errors_say_exactly_what_was_wrong():
    task = next(t for t in TASKS["train", "easy"] if t.spec["open"] == ["money"])
    token = task.spec["tokens"]["money"]
    for call, told in {
        f"money.pay({token}, ann, 5)": "money.pay needs by",
        "money.pay(by=CARD)": "money.pay needs token, to, sum",
        f"money.pay({token}, ann, 5, CARD, 6)": "money.pay takes 4 arguments at most",
        f"money.pay({token}, ann, 5, to=CARD)": "to is given twice",
        f"money.pay({token}, ann, color=5)": "money.pay has no argument color, but token, to, sum, by",
        f"money.pay({token}, to=ann, 5, CARD)": "a value without a name cannot follow one with a name",
        f"money.pay({token}, zoe, 5, CARD)": "to must be one of ann, bob, eve, joe, kim, tom",
        f"money.pay({token}, ann, five, CARD)": "sum must be a number from 1 to 9",
        f"money.pay({token}, ann, 5, card)": "by must be one of CARD, BANK, CASH",
        "money.pay(t0, ann, 5, CARD)": "this is not a token of money, money.login gives one",
        f"mail.list({task.spec['tokens']['mail']}, 1)": "this is not a token of mail, mail.login gives one",
        f"money.list({token}, 9)": "page 9 of money is past the last one, 2",
        "money.login(white)": "this is not the password of money",
        "money.fly()": "money has no such api, see docs.show(app=money)",
        "zebra.fly()": "there is no such app, docs.show() tells which there are",
        "me.done(now)": "me.done takes no argument",
        "maps.ask(pay tea 5)": "a request is three words such as pay ann 5",
    }.items():
        spec = {**task.spec, "tables": {**task.spec["tables"], "money": dict(zip("1234", "abcd", strict=True))}}
        again = Task(task.id, task.split, task.tier, task.family, task.instruction, spec)
        assert play(again, [call])[0][0][0] == f"Not possible: {told}."


def test_spaces_quotes_case_and_names_of_arguments_do_not_matter():
    task = next(t for t in TASKS["train", "easy"] if t.spec["open"] == ["money"])
    token, way = task.spec["tokens"]["money"], task.spec["works"]["pay"].split()[1]
    for call in (
        f"money.pay({token}, ann, 5, {way})", f" Money . Pay ( {token} ,ann,5 , by = {way} ) ;",
        f"`money.pay({token},Ann,5,{way})`",
        f"money.pay(by='{way}', sum=\"5\", to=\"ann\", token='{token}')", f"money.pay({token}, ann, by={way}, sum=5).\r\n",
    ):  # fmt: skip
        assert play(task, [call])[0][0][0] == "Saved in money: ann 5.", call


# -- documentation and pages -----------------------------------------------------------------------------


def test_the_docs_app_leads_to_every_argument_of_every_api():
    env, task = apps.Apps(), TASKS["train", "easy"][0]

    def show(call):
        env.reset(task)
        observation = env.step(call)[0]
        assert len(observation) < 150
        return observation

    found = re.findall(r"\w+", show("docs.show()").split(". ")[0])[1:]
    apis = [f"{app}.{api}" for app in found for api in show(f"docs.show({app})").split(". ")[0].split("has ")[1].split(", ")]
    assert sorted(apis) == sorted(apps._APPS_APIS) and len(found) >= 4 and len(apis) >= 25
    for api in apis:
        told = show(f"docs.show(api={api})")
        assert told.startswith(f"{api}(") and all(name in told for name in apps._APPS_APIS[api])
        if api.split(".")[1] in REQUESTS:
            assert all(way in told for way in REQUESTS[api.split(".")[1]][3])


def test_pages_show_every_row_once_and_a_few_at_a_time():
    for task in ALL[::20]:
        for app, rows in task.spec["tables"].items():
            env, shown, pages, page = apps.Apps(), [], 1, 1
            env.reset(task)
            env.step(f"{app}.login({task.spec['passwords'][app]})")
            while page <= pages:
                env.steps = 0
                observation = env.step(f"{app}.list({task.spec['tokens'][app]}, {page})")[0]
                pages = int(re.match(r"Page \d of (\d): ", observation)[1])
                found = re.findall(r"([a-z]+) (\d)[,.]", observation)
                assert 1 <= len(found) <= 3
                shown, page = shown + found, page + 1
            assert dict((i, text) for text, i in shown) == rows and len(shown) == len(rows)


# -- the scripted behaviour and the prompts --------------------------------------------------------------


def test_slips_are_calls_that_change_nothing_and_do_not_end_an_episode():
    rng, task = random.Random(0), task_of("add")
    wrong = 0
    for _ in range(500):
        [(observation, _, terminated, *_)], env = play(task, [apps.apps_slip(rng)])
        wrong += observation.startswith("Not possible")
        assert not terminated and env.tables == task.spec["tables"] and env.open == set(task.spec["open"])
    assert wrong > 450


def test_the_script_goes_on_after_slips():
    """Practice has slips: the script must cope with any observation."""
    rng = random.Random(0)
    for _ in range(100):
        task = apps.apps_practice(rng)
        env, script, over = apps.Apps(), apps.AppsScript(task, rng), False
        observation, _ = env.reset(task)
        while not over:
            action = script.reply(observation)[1]
            observation, _, terminated, truncated, info = env.step(apps.apps_slip(rng) if rng.random() < 0.3 else action)
            over = terminated or truncated
            assert info["feedback"] != "Something else was changed too."


def test_examples_in_the_instructions_are_calls():
    """H82: each example in a prompt, fed to the parser."""
    full = apps.INSTRUCTIONS["apps"]["full"]
    calls = re.findall(r"\w+\.\w+\([\w.=]*\)", full)
    assert full.split("Example of an action: ")[1] in calls and len(calls) >= 5
    for call in calls:
        observation = play(task_of("add"), [call.replace("(app)", "(notes)")])[0][0][0]
        assert not observation.startswith("Not possible"), call


def test_texts_are_short_enough_for_the_tiny_model_and_strategies_restate_the_goal():
    rng, prompts, observations, replies = random.Random(0), [], [], []
    for task in ALL:
        steps, _ = play_script(task, rng, wild=rng.random() < 0.5)
        prompts.append(len(task.instruction + apps.Apps().reset(task)[0]))
        replies += [len(strategy + action) for strategy, action, _ in steps]
        observations += [len(observation) for *_, observation in steps]
        assert {s.split(": ")[0] for s, *_ in steps} <= {apps._apps_label(job) for job in task.spec["jobs"]}
    assert max(prompts) < 90 and max(observations) < 80 and max(replies) < 75
