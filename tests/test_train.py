"""The training loop: resume, checkpoints, interruption, and what is logged.  Played with coins (conftest.py)."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import envs
import eval as evaluation
import train
from conftest import play_coins, smallest_run
from policy import load_policy

HERE = Path(__file__).parent

# -- fixtures --------------------------------------------------------------------------------------------


def strict(text):
    """JSON as others read it: without NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def metrics_of(out):
    """metrics.jsonl without what a clock says."""
    lines = [strict(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]


def transcripts_of(out):
    with gzip.open(out / "episodes.jsonl.gz", "rt", encoding="utf-8") as f:
        return [strict(line) for line in f]


def checkpoint_of(out):
    """(weights, optimiser and random states, everything else but the clock's) of a checkpoint."""
    folder = train.checkpoint_folder(str(out))
    state = torch.load(folder / "state.pt", weights_only=True)
    plain = json.loads((folder / "state.json").read_text())
    del plain["totals"]["seconds"]
    return load_file(folder / "model" / "model.safetensors"), state, plain


def equal(a, b):
    """Bitwise equality of nested containers with tensors in them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def same_run(a, b):
    """All that two runs have left is equal to the last bit."""
    for x, y in zip(checkpoint_of(a), checkpoint_of(b), strict=True):
        assert equal(x, y)
    assert metrics_of(a) == metrics_of(b)
    assert transcripts_of(a) == transcripts_of(b)
    return True


def new_run(flags):
    """A Run that is ready for its first update, and the folder for it."""
    config, _ = train.parse_flags(flags)
    Path(config.out).mkdir(exist_ok=True)
    return train.Run(config, load_policy(config.model, config.env))


def quiet(n=1):
    """A tick that does nothing."""


@pytest.fixture(scope="module")
def whole(micro_base, tmp_path_factory):
    """A run of four updates that nothing interrupted; the tasks come round two and a half times."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        play_coins(patch.setattr)
        assert train.main(smallest_run(micro_base, out)) == 0
    return out


# -- resume ----------------------------------------------------------------------------------------------


def test_a_run_resumed_in_a_new_process_is_the_uninterrupted_run(whole, train_flags, coins, tmp_path):
    """G59 (moments), G60 (random states), G61 (task order), K102 (buffers): all bitwise, metrics included."""
    half = tmp_path / "half"
    assert train.main(train_flags("half", updates=2)) == 0
    at_two = checkpoint_of(half)
    with open(half / "metrics.jsonl", "a") as f:  # an update after the last checkpoint: to be made again
        f.write(json.dumps({"update": 3, "stale": True}) + "\n")
    script = f"""if True:
        import sys
        sys.path.insert(0, {str(HERE)!r})
        import random, conftest, torch
        conftest.play_coins()
        random.seed(99), torch.manual_seed(99)  # nothing may hang on the global streams
        import train
        sys.exit(train.main(["--resume", {str(half)!r}, "--updates", "4"]))"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert same_run(whole, half)
    weights, _, plain = checkpoint_of(half)
    assert not equal(weights, at_two[0]) and at_two[1]["optimizer"]["state"] and plain["buffers"]  # no empty run
    assert len({t["mode"] for t in transcripts_of(half)}) > 1


@pytest.mark.parametrize("torn", ["metrics.jsonl", "episodes.jsonl.gz"])
def test_a_line_that_a_kill_tore_does_not_keep_a_run_from_being_resumed(train_flags, coins, tmp_path, torn):
    """G62: a kill while logging.  The torn update is later than the checkpoint, hence to be made again anyway."""
    out = tmp_path / "run"
    assert train.main(train_flags("run", updates=1)) == 0
    line = b'{"update": 2, "success_pl'
    with open(out / torn, "ab") as f:
        f.write(gzip.compress(line * 100)[:-20] if torn.endswith("gz") else line)
    assert train.main(["--resume", str(out), "--updates", "2"]) == 0
    assert [m["update"] for m in metrics_of(out)] == [1, 2]
    assert {t["update"] for t in transcripts_of(out)} == {1, 2}


def test_ctrl_c_finishes_the_update_saves_and_can_be_resumed(whole, train_flags, coins, monkeypatch, tmp_path, capsys):
    """G61: interrupted anywhere, the run goes on as if nothing had happened."""
    out, handler, sent = tmp_path / "cut", signal.getsignal(signal.SIGINT), []

    def interrupt():  # in the middle of the second update's rollout
        if not sent and (out / "metrics.jsonl").exists():
            sent.append("SIGINT")
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(coins, "on_step", staticmethod(interrupt))
    assert train.main(train_flags("cut")) == 130 and sent
    assert "--resume" in capsys.readouterr().out
    assert [m["update"] for m in metrics_of(out)] == [1, 2] and checkpoint_of(out)[2]["done"] == 2
    assert not (out / "summary.json").exists() and signal.getsignal(signal.SIGINT) is handler
    assert train.main(["--resume", str(out)]) == 0
    assert same_run(whole, out)


def test_a_second_ctrl_c_stops_at_once_and_the_last_checkpoint_stands(train_flags, coins, monkeypatch, tmp_path):
    out, sent = tmp_path / "cut", []

    def interrupt():
        if len(sent) < 2 and (out / "metrics.jsonl").exists():
            sent.append("SIGINT")
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(coins, "on_step", staticmethod(interrupt))
    assert train.main(train_flags("cut", save_every=1)) == 130
    assert len(sent) == 2 and len(metrics_of(out)) == 1 and checkpoint_of(out)[2]["done"] == 1


# -- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", ["torch.save", "save_pretrained", "between the renames"])
def test_a_checkpoint_is_written_all_or_nothing(train_flags, coins, monkeypatch, tmp_path, dies):
    """G62: a kill while saving leaves a torn file that is then taken for the latest."""
    flags = train_flags("run")
    run = new_run(flags)
    run.one_update(quiet)
    run.save()
    first = checkpoint_of(tmp_path / "run")
    run.one_update(quiet)
    with monkeypatch.context() as patch:

        def half(state, path, *args, **kwargs):
            Path(path).write_bytes(b"PK\x03\x04 torn")
            raise OSError("disk full")

        def rename(self, target, real=Path.rename):
            if Path(target).name == "checkpoint":
                raise OSError("killed")
            return real(self, target)

        if dies == "torch.save":
            patch.setattr(torch, "save", half)
        elif dies == "save_pretrained":
            patch.setattr(type(run.policy.tokenizer), "save_pretrained", half)
        else:
            patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError):
            run.save()
    assert equal(checkpoint_of(tmp_path / "run"), first)
    again = new_run(flags)
    again.load()
    assert again.done == 1
    run.save()  # and when there is room again, the next one is whole
    assert checkpoint_of(tmp_path / "run")[2]["done"] == 2
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["checkpoint"]


def test_weights_come_back_by_from_pretrained_with_the_head_still_tied(train_flags, coins, tmp_path):
    """G66: after a reload the head is random, or the embedding is there twice."""
    run = new_run(train_flags("run"))
    model = run.policy.model
    before = model.get_input_embeddings().weight.detach().clone()
    for _ in range(2):
        run.one_update(quiet)
    run.save()
    ids = torch.arange(20)[None]
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint" / "model"),
        load_policy(str(tmp_path / "run"), "house").model,  # a run folder stands for its checkpoint
    ):
        with torch.no_grad():
            assert torch.equal(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not torch.equal(before, model.get_input_embeddings().weight)
    held = [p for group in run.optimizer.param_groups for p in group["params"]]
    assert len({p.data_ptr() for p in held}) == len(held) == len(list(model.parameters()))


# -- an update -------------------------------------------------------------------------------------------


def test_members_of_a_group_share_task_and_start_and_groups_are_draws_not_texts(train_flags, coins, monkeypatch):
    """H72: the advantage measures the luck of the start.  E39: a task that is drawn twice makes two groups."""
    run = new_run(train_flags("run", tasks_per_update=4, group_size=3, p_fail=0, p_success=0))  # of three tasks
    hidden = {}

    def spy(self, task, real=coins.reset):
        observation, info = real(self, task)
        hidden.setdefault(task.id, []).append((observation, dict(self.where), set(self.opened)))
        return observation, info

    monkeypatch.setattr(coins, "reset", spy)
    _, episodes = run.one_update(quiet)
    groups = {}
    for e in episodes:
        groups.setdefault(e.group, []).append((e.task.id, e.turns[0].observation, tuple(e.ids[: e.mask.index(True)])))
    assert [len(g) for g in groups.values()] == [3, 3, 3, 3] and all(len(set(g)) == 1 for g in groups.values())
    assert len({g[0] for g in groups.values()}) == 3, "two groups play one task"
    assert all(starts == [starts[0]] * len(starts) and len(starts) >= 3 for starts in hidden.values())
    assert len({str(starts[0]) for starts in hidden.values()}) == 3


def test_a_pass_over_the_tasks_draws_each_one_once(train_flags, coins):
    """G61: tasks are repeated or skipped, mostly from the second pass on."""
    run = new_run(train_flags("run"))
    passes = [[t.id for t in run.next_tasks(3)] for _ in range(20)]
    assert all(sorted(p) == sorted(t.id for t in run.tasks) for p in passes)
    assert len({tuple(p) for p in passes}) > 1


def test_an_episode_never_reflects_on_its_own_group(train_flags, coins):
    """paper.md 1.4: buffers are filled after collection.  So the first update is plain, the second reflects on it."""
    run = new_run(train_flags("run", tasks_per_update=3, group_size=4, p_fail=0.5, p_success=0.5))
    first, second = (run.one_update(quiet)[1] for _ in range(2))
    assert {e.reflection.mode for e in first} == {"plain"}
    earlier = {(e.task.id, tuple(s for s in e.strategies if s)) for e in first}
    reflected = [e for e in second if e.reflection.mode != "plain"]
    assert reflected and all((e.task.id, e.reflection.strategies) in earlier for e in reflected)


def test_metrics_have_plain_and_reflected_success_apart(train_flags, coins):
    """paper.md 8.1: every curve that counts is measured without reflection."""
    run = new_run(train_flags("run", tasks_per_update=6, group_size=8, p_fail=0.4, p_success=0.3))
    for _ in range(2):
        metrics, episodes = run.one_update(quiet)

    def rate(*wanted):
        rewards = [e.reward for e in episodes if all(w in (e.reflection.mode, e.task.tier) for w in wanted)]
        return sum(rewards) / len(rewards)

    for mode in ("plain", "negative", "positive"):
        assert metrics[f"success_{mode}"] == rate(mode)
    for tier in envs.TIERS:
        assert metrics[f"success_plain_{tier}"] == rate("plain", tier)
    assert len({rate("plain"), rate("negative"), rate("positive"), rate()}) > 1
    assert metrics["episodes"] == 48 and metrics["total_episodes"] == 96
    assert metrics["env_steps"] == sum(len(e.turns) for e in episodes) == 96
    assert metrics["tokens"] == sum(map(sum, (e.mask for e in episodes)))
    assert metrics["reflected"] == sum(e.reflection.mode != "plain" for e in episodes) / 48


def test_the_learning_rate_follows_the_updates_not_the_optimiser_steps(train_flags, coins):
    """G65: a schedule that is advanced by every minibatch ends too early."""
    run, rates, steps = new_run(train_flags("run", updates=4, epochs=3, minibatch_steps=4, tasks_per_update=4)), [], []
    real = run.optimizer.step
    run.optimizer.step = lambda: (rates[-1].append(run.optimizer.param_groups[0]["lr"]), real())
    for _ in range(4):
        rates.append([])
        steps.append(run.one_update(quiet)[0]["optimizer_steps"])
    assert max(steps) > 1 and [len(r) for r in rates] == steps
    for mine, share in zip(rates, (1, 1, 1, 0.5), strict=True):
        assert mine == [1e-3 * share] * len(mine)


def test_metrics_of_length_do_not_come_from_the_loss_mask(train_flags, coins):
    """D37: mean length and share of cut-off replies are of all episodes, also where the loss leaves the cut ones out."""
    run = new_run(train_flags("run", overlong_mask="on", reply_tokens=9, strategy_tokens=4))
    metrics, episodes = run.one_update(quiet)
    replies = [turn.finish for e in episodes for turn in e.turns]
    assert 0 < replies.count("length") and metrics["kept"] < 1
    assert metrics["cut_off_replies"] == replies.count("length") / len(replies)
    assert metrics["tokens"] == sum(sum(e.mask) for e in episodes) and metrics["episodes"] == len(episodes)


@pytest.mark.parametrize(
    "method, temps, modes", [("sge", {1.2, 0.7}, {"plain", "negative", "positive"}), ("grpo", {0.7}, {"plain"})]
)
def test_the_method_decides_on_temperatures_and_reflection(train_flags, coins, method, temps, modes):
    """paper.md 1.1: SGE minus the GRPO baseline is mixed temperature and reflection, and nothing else."""
    run = new_run(train_flags("run", method=method, tasks_per_update=6, group_size=8))
    for _ in range(2):
        _, episodes = run.one_update(quiet)
    assert {round(t, 6) for e in episodes for t, m in zip(e.temps, e.mask, strict=True) if m} == temps
    assert {e.reflection.mode for e in episodes} == modes


# -- evaluation ------------------------------------------------------------------------------------------


def test_evaluation_changes_nothing_in_training(train_flags, coins):
    """design.md 3: evaluation has its own random streams; G63: it gives the model back in the mode it was in."""
    run = new_run(train_flags("run"))
    run.one_update(quiet)
    run.policy.model.train()

    def everything():
        streams = random.getstate(), torch.get_rng_state(), run.rng.getstate()
        streams += run.sampling_rng.get_state(), run.shuffle_rng.get_state()
        weights = [p.detach().clone() for p in run.policy.model.parameters()]
        modes = [m.training for m in run.policy.model.modules()]
        return [*streams, weights, run.buffers.state_dict(), list(run.queue), run.done, dict(run.totals), modes]

    before = everything()
    rates = [train.plain_success(run, split, 3, seed=0) for split in envs.SPLITS]
    assert equal(everything(), before) and any(0 < rate < 1 for by_tier in rates for rate in by_tier.values())


@pytest.mark.parametrize("most", [0, 3, 35, 10**6])
def test_evaluations_play_as_many_tasks_of_each_tier_as_asked(train_flags, monkeypatch, most):
    """--final-tasks: spread over the list of a tier, in which the families come one after the other; 0 means all."""
    run, played = new_run(train_flags("run", final_tasks=most)), []

    def lose(policy, world, tasks, *_):
        played.extend(tasks)
        return [dict(tier=task.tier, tries=1, successes=0) for task in tasks]

    monkeypatch.setattr(train.evaluation, "count_successes", lose)
    assert train.plain_success(run, "test", 1, seed=0) == dict.fromkeys(envs.TIERS, 0.0)
    for tier in envs.TIERS:
        mine, tasks = [t for t in played if t.tier == tier], envs.tasks("house", "test", tier)
        where = [tasks.index(task) for task in mine] + [len(tasks)]
        assert len(mine) == (min(most, len(tasks)) if most else len(tasks)) and where[0] == 0
        gaps = [b - a for a, b in pairwise(where)]
        assert 1 <= min(gaps) and max(gaps) <= min(gaps) + 1, (tier, gaps)


def test_a_run_with_evaluations_is_the_run_without(whole, train_flags, coins, tmp_path):
    out = tmp_path / "looked_at"
    assert train.main(train_flags("looked_at", eval_every=1)) == 0
    for x, y in zip(checkpoint_of(whole), checkpoint_of(out), strict=True):
        assert equal(x, y)
    seen = metrics_of(out)
    assert all({f"eval_{t}" for t in envs.TIERS} <= m.keys() for m in seen)
    assert [{k: v for k, v in m.items() if not k.startswith("eval_")} for m in seen] == metrics_of(whole)


# -- the end ---------------------------------------------------------------------------------------------


def test_a_finished_run_has_a_summary_by_tier_and_curves(whole):
    """design.md 7: the keys that readers and checks rely on."""
    summary = strict((whole / "summary.json").read_text())
    assert summary.keys() == {*envs.TIERS, "totals"}
    for tier in envs.TIERS:
        assert summary[tier].keys() == {"base_pass@1", "base_pass@2", "pass@1", "test_pass@1"}
        assert all(0 <= v <= 1 for v in summary[tier].values())
    assert summary["totals"]["updates"] == 4 and summary["totals"]["episodes"] == 32
    assert (whole / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert evaluation.read_run(str(whole))[2] == summary


def test_the_smallest_base_measurement_does_not_spoil_the_end_of_a_run(train_flags, coins, tmp_path, capsys):
    """--base-tries 1 has no pass@n besides pass@1: refused at once, or a run with a closing table; no late surprise."""
    try:
        code = train.main(train_flags("run", updates=1, base_tries=1))
    except SystemExit as refused:
        assert refused.code == 2 and not (tmp_path / "run").exists()
    else:
        assert code == 0 and (tmp_path / "run" / "summary.json").exists(), capsys.readouterr().err


def test_the_progress_line_shows_what_was_measured_and_a_dash_for_the_rest():
    always = dict(update=3, success_plain=0.5, kept=0.0, rollout_seconds=1.0, update_seconds=2.0)
    assert train.readable(always, 40) == (
        "update   3/40 | plain  50%: easy   -  medium   -  hard   -  | after failure   -  after success   -  | "
        "kept   0% clipped   -  | entropy   - /  -  | 1.0+2.0 s"
    )
    trained = dict(always, success_plain_hard=0.07, clip_fraction=0.0014, strategy_entropy=0.254, action_entropy=0.001)
    line = train.readable(trained, 40)
    assert "hard   7% |" in line and "clipped  0.1% | entropy 0.25/0.00 |" in line
