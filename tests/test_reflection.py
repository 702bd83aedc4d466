"""Strategy buffers, reflection prompts, and the form of a reply."""

import doctest
import json
import random
from collections import Counter

import pytest

import envs
import eval as evaluation
import grpo
import reflection
import train
from policy import load_policy
from reflection import FORMATS, PLAIN, Reflection, StrategyBuffers, instruction, parse_reply
from sampler import Sampling

# -- fixtures --------------------------------------------------------------------------------------------


class Scripted(random.Random):
    """A random stream that is written down; it counts what is drawn."""

    def __init__(self, *values):
        super().__init__(0)
        self.values, self.drawn = list(values), 0

    def random(self):
        self.drawn += 1
        return self.values.pop(0) if self.values else 0.5


def filled(fails=("f",), wins=("w",), **how):
    """Buffers of task "a" with one-step episodes."""
    buffers = StrategyBuffers(**how)
    for s in fails:
        buffers.push("a", False, [s], "it fell")
    for s in wins:
        buffers.push("a", True, [s])
    return buffers


def held(buffers, key, success):
    """First strategies of what a FIFO holds, oldest first."""
    return [entry[0][0] for k, won, entries in buffers.state_dict() for entry in entries if (k, won) == (key, success)]


# -- the buffers -----------------------------------------------------------------------------------------


def test_a_fifo_holds_the_last_32_and_each_task_and_outcome_has_its_own():
    """paper.md 9: at most 32, oldest out first, per task and outcome."""
    buffers = filled(fails=[f"f{i}" for i in range(40)], wins=[f"w{i}" for i in range(33)])
    buffers.push("b", False, ["other"])
    assert held(buffers, "a", False) == [f"f{i}" for i in range(8, 40)]
    assert held(buffers, "a", True) == [f"w{i}" for i in range(1, 33)]
    assert held(buffers, "b", False) == ["other"] and held(buffers, "b", True) == []


@pytest.mark.parametrize(
    "x, mode",
    [
        (0.0, "negative"),
        (0.2499, "negative"),
        (0.25, "positive"),
        (0.3499, "positive"),
        (0.3501, "plain"),
        (1, "plain"),
    ],
)
def test_one_number_decides_between_failure_success_and_plain(x, mode):
    """paper.md 1.4: x < p_fail, x < p_fail + p_success, else plain."""
    assert filled().draw("a", Scripted(x, 0.0)).mode == mode


def test_probabilities_are_unconditional_and_an_empty_buffer_falls_to_plain():
    """paper.md 1.5 no. 4: without failures the share of successes does not grow, and the other way round."""
    xs = [(i + 0.5) / 1000 for i in range(1000)]

    def shares(buffers, key="a"):
        return Counter(buffers.draw(key, Scripted(x, 0.0)).mode for x in xs)

    assert shares(filled()) == {"negative": 250, "positive": 100, "plain": 650}
    assert shares(filled(fails=())) == {"positive": 100, "plain": 900}
    assert shares(filled(wins=())) == {"negative": 250, "plain": 750}
    assert shares(filled(), key="b") == {"plain": 1000}
    assert shares(filled(p_fail=0, p_success=0)) == {"plain": 1000}
    assert shares(filled(p_fail=0.5, p_success=0.5)) == {"negative": 500, "positive": 500}


def test_every_draw_takes_as_many_random_numbers_whatever_the_buffers_hold():
    """G61: else what one task remembers would shift the draws, and the task order, of all others."""
    counts = set()
    for buffers in (StrategyBuffers(), filled(), filled(fails=["f"] * 40), filled(pick="newest")):
        for x in (0.1, 0.3, 0.9):
            rng = Scripted(x)
            buffers.draw("a", rng)
            counts.add(rng.drawn)
    assert len(counts) == 1


def test_entries_are_drawn_uniformly_or_the_newest_is_taken():
    names = [f"f{i}" for i in range(5)]
    rng = random.Random(0)
    seen = Counter(filled(fails=names, p_fail=1, p_success=0).draw("a", rng).strategies[0] for _ in range(5000))
    assert set(seen) == set(names) and all(abs(n - 1000) < 130 for n in seen.values())  # 4.6 sigma
    newest = filled(fails=names, p_fail=1, p_success=0, pick="newest")
    assert {newest.draw("a", rng).strategies for _ in range(9)} == {("f4",)}


def test_a_reference_is_the_whole_sequence_of_strategies_with_the_feedback_of_a_failure():
    """paper.md 1.3: the entire sequence, text feedback with failures only."""
    buffers = StrategyBuffers(p_fail=0.5, p_success=0.5)
    buffers.push("a", False, ["one", "two", "", "three"], "the apple never moved")
    buffers.push("a", True, ["four", "five"], "of no use")
    assert buffers.draw("a", Scripted(0.1)) == Reflection("negative", ("one", "two", "three"), "the apple never moved")
    assert buffers.draw("a", Scripted(0.9)) == Reflection("positive", ("four", "five"), "")


def test_an_episode_without_any_strategy_is_not_remembered():
    buffers = StrategyBuffers()
    buffers.push("a", False, ["", ""])
    assert buffers.state_dict() == [] and buffers.draw("a", Scripted(0.1)) is PLAIN


def test_last_paragraph_drops_the_critique_before_the_strategy():
    """paper.md 1.5 no. 7."""
    critique = "It only looked at the bed.\nTwice.\n\nLook in the chest."
    kept = {store: held(filled(fails=[critique], store=store), "a", False) for store in ("block", "last_paragraph")}
    assert kept == {"block": [critique], "last_paragraph": ["Look in the chest."]}


def test_buffers_come_back_from_json_and_go_on_identically():
    """K102: memory is empty, or in another order, after a restore."""
    before = filled(fails=[f"f{i}" for i in range(35)], wins=["w0", "w1"], p_fail=0.6, p_success=0.3)
    before.push("b", True, ["x", "y"])
    after = StrategyBuffers(p_fail=0.6, p_success=0.3)
    after.push("stale", True, ["to be forgotten"])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()
    rngs = random.Random(1), random.Random(1)
    for i in range(100):  # eviction goes on as well
        for buffers in (before, after):
            buffers.push("a", i % 3 == 0, [f"new{i}"], "told")
        a, b = (buffers.draw("ab"[i % 2], rng) for buffers, rng in zip((before, after), rngs, strict=True))
        assert a == b and hash(a) == hash(b)  # hashable: the sampler keys prompts by it
    assert len(held(after, "a", False)) == 32 and after.state_dict() == before.state_dict()


@pytest.mark.parametrize(
    "wrong",
    [
        dict(size=0), dict(p_fail=-0.1), dict(p_success=-0.1), dict(p_fail=0.7, p_success=0.4),
        dict(p_fail=float("nan")), dict(pick="oldest"), dict(store="first_paragraph"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError):
        StrategyBuffers(**wrong)


# -- prompts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("brief", [True, False])
@pytest.mark.parametrize("mode", ["negative", "positive"])
def test_a_reflection_prompt_shows_all_strategies_in_order_once(mode, brief):
    feedback = "It sank." if mode == "negative" else ""
    text = instruction(Reflection(mode, ("alpha", "beta", "gamma"), feedback), FORMATS["header"], brief)
    assert [text.count(s) for s in ("alpha", "beta", "gamma")] == [1, 1, 1]
    assert text.index("alpha") < text.index("beta") < text.index("gamma")
    assert ("It sank." in text) == (mode == "negative")


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "none"])
def test_the_three_prompts_differ_and_name_the_form_of_a_reply(form):
    """H83: the output format is defined but never sent."""
    modes = ("plain", "negative", "positive")
    texts = [instruction(Reflection(mode, ("s",)), FORMATS[form], brief=False) for mode in modes]
    assert len(set(texts)) == 3
    assert all(FORMATS[form].write in text and FORMATS[form].act in text for text in texts)


def prompt(policy, task, ref=PLAIN):
    observation, _ = envs.make_env("house").reset(task)
    return policy.tokenizer.decode(policy.prompt_ids("house", task, observation, ref))


def test_a_new_entry_is_in_the_next_prompt_of_its_task_exactly_once(micro_base):
    """K103: the first version of a memory is replayed for ever; or it leaks to other tasks."""
    policy, (task, other) = load_policy(micro_base, "house"), envs.tasks("house", "train")[:2]
    buffers = StrategyBuffers(p_fail=1, p_success=0, pick="newest")
    for text in ("look at the moon", "dig a hole"):
        buffers.push(task.id, False, [text], "Bad luck.")
        shown = prompt(policy, task, buffers.draw(task.id, random.Random(0)))
        assert shown.count(text) == 1 and shown.count("Bad luck.") == 1
    assert "look at the moon" not in shown
    assert prompt(policy, other, buffers.draw(other.id, random.Random(0))) == prompt(policy, other)


def test_evaluation_never_shows_an_earlier_strategy_but_training_does(micro_base, coins, train_flags, monkeypatch):
    """paper.md 9: evaluation prompts contain no strategies.  K103: nothing of evaluation gets into the buffers."""
    config, _ = train.parse_flags(train_flags("run", p_fail=1, p_success=0))
    run = train.Run(config, load_policy(micro_base, "house"))
    for task in envs.tasks("house", "train") + envs.tasks("house", "test"):
        run.buffers.push(task.id, False, ["xyzzy"])
    before, prompts = run.buffers.state_dict(), []
    real = type(run.policy).prompt_ids

    def spy(self, *args):
        ids = real(self, *args)
        prompts.append(self.tokenizer.decode(ids))
        return ids

    monkeypatch.setattr(type(run.policy), "prompt_ids", spy)
    for split in envs.SPLITS:
        train.plain_success(run, split, 2, 0)
    evaluation.count_successes(run.policy, "house", run.tasks, 2, Sampling(), 0)
    assert len(prompts) >= 9 and not any("xyzzy" in text for text in prompts)
    assert run.buffers.state_dict() == before
    prompts.clear()
    run.one_update(lambda: None)
    assert prompts and all("xyzzy" in text for text in prompts)


@pytest.mark.parametrize("scope", ["task", "family"])
def test_every_episode_is_remembered_at_once_under_its_task_and_outcome(micro_base, coins, train_flags, scope):
    """K104: the buffer reports 0 episodes right after a run.  Only strategies are kept, cut-off episodes included."""
    flags = train_flags("run", buffer_scope=scope, tasks_per_update=3, group_size=4, reply_tokens=12)
    run = train.Run(train.parse_flags(flags)[0], load_policy(micro_base, "house"))
    _, episodes = run.one_update(lambda: None)
    want = {}
    for e in episodes:
        key = e.task.id if scope == "task" else f"{e.task.tier}/{e.task.family}"
        strategies = [turn.strategy for turn in e.turns if turn.strategy]
        if strategies:
            want.setdefault((key, e.reward == 1), []).append(strategies)
    held_now = run.buffers.state_dict()
    got = {(key, won): [list(strategies) for strategies, _ in entries] for key, won, entries in held_now}
    assert got == want and {won for _, won in got} == {True, False}
    assert any(turn.finish == "length" for e in episodes for turn in e.turns)


# -- the form of a reply ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, strategy, action",
    [
        ("look at the bed\n### Action\ngo bed", "look at the bed", "go bed"),
        ("look at the bed\r\n### Action\r\ngo bed\r\n", "look at the bed", "go bed"),  # H74: Windows line ends
        ("\n one\n\ntwo \n### Action\n\n go bed \n\n", "one\n\ntwo", "go bed"),  # H74: newlines inside
        ("look### Actiongo bed", "look", "go bed"),
        ("look at the bed", "look at the bed", ""),  # no delimiter: no action
        ("look\n### action\ngo bed", "look\n### action\ngo bed", ""),  # nor is this one
        ("### Action\ngo bed", "", "go bed"),
        ("look\n### Action", "look", ""),
        ("", "", ""),
        # H75, by the stated rule: the first delimiter ends the strategy, the rest is the action
        ("look\n### Action\ngo bed\n### Action\ngo sofa", "look", "go bed\n### Action\ngo sofa"),
        # the next strategy, begun in the same reply, is no part of the action
        ("look\n### Action\ngo bed\n### Strategy\nlook\n### Action\ngo sofa", "look", "go bed"),
    ],
)
def test_replies_are_split_at_the_first_delimiter(text, strategy, action):
    """H74, H75."""
    assert parse_reply(text, FORMATS["header"]) == (strategy, action)


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "none"])
def test_replies_of_every_form_are_split(form):
    form = FORMATS[form]
    assert parse_reply(f"look\nagain{form.closing}\ngo bed\n", form) == ("look\nagain", "go bed")


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "none"])
def test_a_stop_text_is_no_part_of_the_strategy_either(form):
    """A reply that begins a second strategy before any action ends there; its header must not get into the buffers."""
    form = FORMATS[form]
    assert parse_reply(f"look at the bed\n{form.stop[0]}", form) == ("look at the bed", "")


# -- examples in docstrings ------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [reflection, grpo, evaluation])
def test_the_examples_in_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
