"""Presets, the format warm-up, and what eval.py takes from a run."""

import json
import random

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import envs
import eval as evaluation
import train
from fixtures import make_tokenizer
from policy import FORMATS, Policy, demo_tokens, load_policy
from test_eval import refused
from test_train import checkpoint_of, metrics_of, new_run, same_run

# -- presets ---------------------------------------------------------------------------------------------

# SGE Table 2, column by column: lr, K, steps a minibatch, tokens a step, trajectories an update, epochs, T_tok, T_strat, p_succ
TABLE_2 = {
    "code": (1e-6, 16, 128, 2048, 1024, 2, 0.7, 1.2, 0.1),
    "phone": (1e-6, 6, 64, 564, 192, 2, 0.7, 1.2, 0.1),
    "house": (1e-6, 16, 128, 520, 512, 1, 0.6, 1.0, 0.1),
    "apps": (1e-5, 8, 128, 768, 128, 2, 0.7, 1.2, 0.5),
}


@pytest.mark.parametrize("env", envs.WORLDS)
def test_the_paper_preset_is_table_2(env, capsys):
    c, _ = train.parse_flags(["--preset", "paper", "--env", env])
    got = (c.lr, c.group_size, c.minibatch_steps, c.reply_tokens, c.tasks_per_update * c.group_size, c.epochs)
    assert got + (c.token_temp, c.strategy_temp, c.p_success) == TABLE_2[env]
    assert (c.clip, c.clip_high, c.buffer_size, c.p_fail, c.lr_schedule, c.reflect) == (0.2, None, 32, 0.25, "constant", "both")
    assert c.strategy_tokens == c.reply_tokens
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"lr {c.lr}" in said and f"reply-tokens {c.reply_tokens}" in said


@pytest.mark.parametrize("method", [m for m in train.METHODS if m != "sge"])
def test_the_paper_preset_heats_no_strategies_of_other_methods(method):
    """paper.md 1.1: mixed temperature is SGE's."""
    config, _ = train.parse_flags(["--preset", "paper", "--env", "house", "--method", method])
    assert (config.strategy_temp, config.token_temp, config.reflect) == (0.6, 0.6, "none")


def test_flags_win_over_a_preset(capsys):
    flags = ["--lr", "5e-6", "--preset=paper,24gb", "--env", "code", "--rows=7"]
    config, _ = train.parse_flags(flags)
    assert (config.lr, config.rows, config.group_size, config.dtype) == (5e-6, 7, 16, "bfloat16")
    said = capsys.readouterr().out
    assert "given otherwise: lr, rows" in said and "rows 64" not in said
    plain, _ = train.parse_flags([])
    assert capsys.readouterr().out == "" and plain == train.Config().resolve()


@pytest.mark.parametrize("env", envs.WORLDS)
def test_the_optimiser_that_the_tiny_model_is_tuned_to_is_for_no_other_model(env, capsys, tmp_path):
    """A learning rate that suits 0.66 million weights would ruin a pretrained model."""
    tiny, other = (train.parse_flags(["--env", env, "--model", name])[0] for name in ("tiny", str(tmp_path)))
    assert (tiny.lr, tiny.minibatch_steps) == (train.TINY[env]["lr"], train.TINY[env]["minibatch_steps"])
    assert tiny.updates == {"apps": 20, "code": 60}.get(env, 40) and other.updates == 40
    assert (tiny.advantage_groups, tiny.p_fail) == (("split", 0.5) if env == "code" else ("joint", 0.25))
    assert (other.advantage_groups, other.p_fail) == ("joint", 0.25)
    assert (other.lr, other.minibatch_steps) == (TABLE_2[env][0], TABLE_2[env][2])
    given, _ = train.parse_flags(["--env", env, "--lr", "0.002", "--minibatch-steps", "7"])
    assert (given.lr, given.minibatch_steps) == (0.002, 7)


@pytest.mark.parametrize("names", ["12gb", "24gb,80gb", "paper,paper", "paper,24gb,80gb", ",", "Paper"])
def test_unknown_presets_are_refused_in_one_line(names, capsys):
    assert names in refused(train.parse_flags, ["--preset", names], capsys)


def qwen3(width, layers, heads, inner):
    """A Qwen3 of the sizes of a published one, without memory for its weights."""
    config = Qwen3Config(
        vocab_size=151936, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).bfloat16()
    model.activation_checkpointing_enable()

    class Weightless(Policy):
        def __init__(self):
            self.model, self.vocab, self.context = model, 151936, 40960

    return Weightless()


SIZES = {"0.6B": (1024, 28, 16, 3072), "4B": (2560, 36, 32, 9728)}


@pytest.mark.parametrize("gpu, size, fits", [("24gb", "0.6B", True), ("80gb", "4B", True), ("24gb", "4B", False)])
def test_gpu_presets_fit_by_the_estimate(gpu, size, fits):
    """Nine tenths of the card hold what they are for; what never fits is refused in one line."""
    config, policy = train.parse_flags(["--preset", gpu, "--model", "x"])[0], qwen3(*SIZES[size])
    needed = sum(train.memory_needed(config, policy).values()) / 2**30
    assert (needed < 0.9 * train.GPUS[gpu][0]) == fits, needed
    if fits:
        train.check_preset_fits(config, policy)
    else:
        with pytest.raises(ValueError, match="--preset 24gb") as error:
            train.check_preset_fits(config, policy)
        assert "\n" not in str(error.value)


# -- warm-up ---------------------------------------------------------------------------------------------

WARM = dict(warmup=3, warmup_batch=2, warmup_lr=1e-3, updates=2)


@pytest.fixture(scope="module")
def warmed(micro_base, tmp_path_factory):
    """A run with a warm-up that nothing interrupted."""
    from conftest import play_coins, smallest_run

    out = tmp_path_factory.mktemp("warm") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        play_coins(patch.setattr)
        assert train.main(smallest_run(micro_base, out, **WARM)) == 0
    return out


def test_a_warm_up_is_measured_before_and_after(warmed, capsys):
    summary = json.loads((warmed / "summary.json").read_text())
    assert summary["easy"].keys() == {"base_pass@1", "base_pass@2", "pass@1", "test_pass@1", "warmup_pass@1"}
    assert json.loads((warmed / "warmup.json").read_text())["easy"]["pass@1"] == summary["easy"]["warmup_pass@1"]
    assert evaluation.main(["compare", str(warmed), "--out", str(warmed / "compare.png")]) == 0


def test_a_resumed_run_does_not_warm_up_again(warmed, train_flags, coins, monkeypatch, tmp_path, capsys):
    """Stopped in its first update, the run has a checkpoint with the warm-up in it; the rest is bitwise the same."""
    with monkeypatch.context() as patch:

        def killed(self, tick):
            raise KeyboardInterrupt

        patch.setattr(train.Run, "one_update", killed)
        assert train.main(train_flags("half", **WARM)) == 130
    assert "warm-up 3/3 | loss " in capsys.readouterr().out  # where there is no bar, lines tell how far it is
    assert checkpoint_of(tmp_path / "half")[2]["done"] == 0
    monkeypatch.setattr(train.Run, "warm_up", lambda self: pytest.fail("a second warm-up"))
    assert train.main(["--resume", str(tmp_path / "half")]) == 0
    assert same_run(warmed, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "summary.json").read_text())["easy"].keys() >= {"warmup_pass@1"}


def test_a_run_stopped_in_its_warm_up_starts_over(warmed, train_flags, coins, monkeypatch, tmp_path, capsys):
    flags = train_flags("cut", **WARM)
    with monkeypatch.context() as patch:

        def killed(self, demos, real=train.Run.imitate, calls=[]):  # noqa: B006
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt  # (not by a signal: where tests run in the background it may be ignored)
            return real(self, demos)

        patch.setattr(train.Run, "imitate", killed)
        assert train.main(flags) == 130
    assert not (tmp_path / "cut" / "checkpoint").exists()
    assert train.main(flags) == 0 and same_run(warmed, tmp_path / "cut")


def test_a_warm_up_teaches_and_leaves_fresh_moments_in_either_precision(train_flags, coins, micro_base):
    for dtype in ("float32", "bfloat16"):
        config, _ = train.parse_flags(train_flags(dtype, warmup=30, warmup_lr=3e-3, dtype=dtype))
        run = train.Run(config, load_policy(micro_base, "house", dtype=dtype))
        first = run.optimizer
        losses, real, rng = [], run.imitate, random.Random(1)
        held = [demo_tokens(run.policy, "house", rng) for _ in range(30)]  # episodes that it is not shown
        before = real(held)
        run.policy.model.zero_grad()
        run.imitate = lambda demos, losses=losses, real=real: losses.append(real(demos)) or losses[-1]
        assert run.warm_up() == losses[-1] and real(held) < 0.95 * before
        run.policy.model.zero_grad()
        assert run.optimizer is not first and not run.optimizer.state and run.optimizer.param_groups[0]["lr"] == config.lr
        if dtype == "bfloat16":  # the masters are of the warm model
            pairs = zip(run.optimizer.masters, run.policy.model.parameters(), strict=True)
            assert all(torch.equal(master.bfloat16(), p) for master, p in pairs)


def test_the_gradient_of_a_warm_up_step_is_that_of_the_mean_over_all_tokens(train_flags, coins):
    """The episodes go through the model one at a time, with one divisor."""
    run = new_run(train_flags("run", warmup=1))
    demos = [([5, 6, 7, 8], [False, True, True, False]), ([9, 5, 6, 7, 8, 9, 9], [False] + [True] * 6)]
    loss = run.imitate(demos)
    ours = [p.grad.clone() for p in run.policy.model.parameters()]
    run.policy.model.zero_grad()
    parts = []
    for ids, mask in demos:
        logps = torch.log_softmax(run.policy.model(torch.tensor([ids])).logits[0, :-1], -1)
        parts += [-logps[i - 1, ids[i]] for i, m in enumerate(mask) if m]
    torch.stack(parts).mean().backward()
    assert loss == pytest.approx(torch.stack(parts).mean().item(), abs=1e-5)
    for a, p in zip(ours, run.policy.model.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-6)


@pytest.mark.parametrize("world", envs.WORLDS)
@pytest.mark.parametrize("form", ["header", "tags"])
def test_demonstrations_for_real_models_have_full_prompts_and_replies_that_parse(world, form):
    import random

    from fixtures import ROTARY, build

    policy = Policy(build("Llama", **ROTARY), make_tokenizer(), FORMATS[form])
    ids, mask = train.demo_tokens(policy, world, random.Random(0))
    prompt = policy.tokenizer.decode(ids[: mask.index(True)])
    assert envs.INSTRUCTIONS[world]["full"] in prompt and prompt.endswith(FORMATS[form].opening)
    reply = [i for i, m in zip(ids, mask, strict=True) if m]
    reply = reply[: reply.index(policy.tokenizer.eos_token_id)]
    strategy, action = policy.parse(policy.decode(reply))
    assert strategy and action


@pytest.mark.parametrize("flags", ["--strategy-format think", "--method grpo --strategy-prompt off", "--kl 0.1", "--method rlad"])
def test_warm_ups_that_make_no_sense_are_refused_in_one_line(flags, capsys):
    assert "--warmup" in refused(train.parse_flags, ["--warmup", "5", *flags.split()], capsys)


# -- a run that begins anew, and eval.py -----------------------------------------------------------------


def test_logs_without_a_checkpoint_are_not_overwritten_in_silence(train_flags, coins, monkeypatch, tmp_path, capsys):
    """A run killed before its first checkpoint: the second one says what it does."""
    flags = train_flags("run", updates=1)
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "save", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert train.main(flags) == 130
    assert (tmp_path / "run" / "metrics.jsonl").exists() and "anew" not in capsys.readouterr().out
    assert train.main(flags) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "anew" in line]
    assert len(said) == 1 and str(tmp_path / "run") in said[0] and [m["update"] for m in metrics_of(tmp_path / "run")] == [1]


def test_passk_takes_what_is_not_given_from_the_run(train_flags, coins, tmp_path, capsys, monkeypatch):
    settings = dict(updates=1, strategy_format="tags", token_temp=0.9, reply_tokens=18, strategy_tokens=9)
    assert train.main(train_flags("run", **settings)) == 0
    capsys.readouterr()
    seen = []
    monkeypatch.setattr(evaluation, "count_successes", lambda *args: seen.append(args) or [])
    run = str(tmp_path / "run")
    assert evaluation.main(["passk", run, "--n", "1", "--device", "cpu", "--reply-tokens", "11", "--strategy-temp", "1"]) == 0
    policy, world, _, _, how, *_ = seen.pop()
    assert (policy.form, world) == (FORMATS["tags"], "house")
    assert (how.token_temp, how.strategy_temp, how.strategy_tokens, how.reply_tokens) == (0.9, 1.0, 9, 11)
    said = capsys.readouterr().out.splitlines()[0]
    assert f"as {run} was trained" in said and "strategy-format tags" in said and "reply-tokens" not in said
    # a model's folder is no run: the defaults, and nothing is said of a run
    assert evaluation.main(["passk", str(tmp_path / "run" / "checkpoint" / "model"), "--n", "1", "--device", "cpu"]) == 0
    policy, _, _, _, how, *_ = seen.pop()
    assert (policy.form, how.token_temp, how.strategy_temp, how.reply_tokens) == (FORMATS["header"], 0.7, 0.7, 64)
    assert "was trained" not in capsys.readouterr().out
    (tmp_path / "run" / "config.json").write_text("{}")
    assert "config.json" in refused(evaluation.main, ["passk", run, "--n", "1"], capsys)


