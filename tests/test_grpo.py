"""GRPO arithmetic: advantages, loss, gradients, and what an update must never do.  Episodes are made by hand."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import envs
import grpo
import policy
from grpo import UpdateSettings, clipped_loss, group_advantages, update
from reflection import Reflection
from sampler import ACTION, STRATEGY, Episode, Turn

HOT, COOL = 1.2, 0.7
LOOSE = UpdateSettings(epochs=1, max_grad_norm=1e9, ratio_tolerance=float("inf"), minibatch_steps=10**6)


# -- fixtures --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return policy.tiny_tokenizer(["go to the bed"], 300)


@pytest.fixture(params=["qwen3", "llama"])
def pi(request, tokenizer):
    """A random model of two layers; peaked enough (large weights) that temperatures matter."""
    shape = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.3, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    if request.param == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    return policy.Policy(model.eval(), tokenizer, brief=True)


@pytest.fixture
def qwen(request, tokenizer):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, initializer_range=0.3, eos_token_id=1,
    )  # fmt: skip
    return policy.Policy(Qwen3ForCausalLM(config).eval(), tokenizer, brief=True)


TASK = envs.Task("t", "train", "easy", "bring", "do it", {})


def true_logprobs(model, ids, temps):
    """log-prob of ids[t] given ids[:t] at temps[t], from a plain forward pass of one row; 0 at position 0."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    logps = torch.log_softmax(logits[:-1] / torch.tensor(temps[1:]).double()[:, None], -1)
    return [0.0] + logps.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).tolist()


def episode(pi, rng, group, reward, turns=((3, 2), (2, 4)), mode="plain"):
    """prompt (5 ids), then for each turn a hot strategy, a cool action and an observation (3 ids)."""
    e = Episode(TASK, Reflection(mode), group, reward=reward)

    def tokens(n):
        return [rng.randrange(5, pi.vocab) for _ in range(n)]

    e.extend(tokens(5), False)
    for hot, cool in turns:
        zeros, temps = [0.0] * (hot + cool), [HOT] * hot + [COOL] * cool
        e.extend(tokens(hot + cool), True, zeros, temps, [STRATEGY] * hot + [ACTION] * cool)
        e.turns.append(Turn("seen", "strategy", "action", "stop"))
        e.extend(tokens(3), False)
    return relogged(pi, e)


def relogged(pi, e):
    """The episode with the log-probs that the model gives now."""
    now = true_logprobs(pi.model, e.ids, e.temps)
    return replace(e, logprobs=[p if m else 0.0 for p, m in zip(now, e.mask, strict=True)])


def batch(pi, rewards=((1, 0, 0, 1), (0, 0, 1, 0)), seed=0):
    """Groups of episodes of different lengths."""
    rng = random.Random(seed)
    made = []
    for group, of_group in enumerate(rewards):
        for i, reward in enumerate(of_group):
            made.append(episode(pi, rng, group, float(reward), ((3, 2), (2, 4), (4, 1))[: 1 + (i + group) % 3]))
    return made


def rows(pairs):
    """(episode, advantage) pairs as the update holds them."""
    return [grpo.Row(e, a, "cpu") for e, a in pairs]


class Recorder(torch.optim.SGD):
    """An optimiser that keeps the gradients of its steps and leaves the weights alone."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.seen = []

    def step(self):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])


def gradients(pi, episodes, how=LOOSE):
    """The gradients of the first optimiser step, one tensor a parameter, and the metrics."""
    recorder = Recorder(pi.model)
    metrics = update(pi, recorder, episodes, how, torch.Generator().manual_seed(0))
    return recorder.seen[0], metrics


def adamw(pi, lr=1e-2):
    return torch.optim.AdamW(pi.model.parameters(), lr=lr, weight_decay=0.01)


def weights(pi):
    return [p.detach().clone() for p in pi.model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run(pi, optimizer, episodes, how=None):
    return update(pi, optimizer, episodes, how or UpdateSettings(), torch.Generator().manual_seed(0))


# -- advantages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wins, total, high, low", [(1, 16, 3.749985, -0.249999), (4, 8, 0.935413, -0.935413)])
def test_advantages_are_those_of_the_unbiased_std_with_epsilon_1e_6(wins, total, high, low):
    """paper.md 9 (the vectors of verl: unbiased, 1e-6)."""
    got = group_advantages([1] * wins + [0] * (total - wins), ["g"] * total)
    assert got == pytest.approx([high] * wins + [low] * (total - wins), abs=1e-6)


def test_advantages_follow_their_rows_when_groups_are_interleaved():
    """E39: baseline mixes prompts, or every row is its own group."""
    rewards = {("p1", 0): 1, ("p2", 0): 3, ("p1", 1): 0, ("p2", 1): 2}
    got = dict(zip(rewards, group_advantages(list(rewards.values()), [p for p, _ in rewards]), strict=True))
    half = 0.5 / (0.5**0.5 + 1e-6)
    for (prompt, i), advantage in got.items():
        assert advantage == pytest.approx(half if i == 0 else -half), (prompt, i)


@pytest.mark.parametrize("rewards", [[0], [1], [0] * 4, [1] * 4, [0.1] * 4, [0.1 + 0.2, 0.3, 0.3]])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(rewards):
    """E42, E50: std of one sample is NaN; rounding residue must not become an advantage."""
    assert group_advantages(rewards, ["g"] * len(rewards)) == [0.0] * len(rewards)


def test_the_baseline_is_the_mean_over_episodes_not_over_turns(qwen):
    """E49: long episodes weigh more in the group mean."""
    rng = random.Random(0)
    lengths, rewards = (1, 3, 1), (0.0, 1.0, 0.0)
    episodes = [episode(qwen, rng, 0, r, ((2, 2),) * n) for n, r in zip(lengths, rewards, strict=True)]
    std = (2 / 3 / 2) ** 0.5
    high, low = (1 - 1 / 3) / (std + 1e-6), -1 / 3 / (std + 1e-6)
    tokens = grpo.token_vectors(rows(zip(episodes, group_advantages(rewards, [0, 0, 0]), strict=True)))
    assert tokens["advantage"].tolist() == pytest.approx([low] * 4 + [high] * 12 + [low] * 4)


def test_all_sampled_tokens_of_an_episode_carry_its_advantage(qwen):
    """D38: tokens before an observation lose their credit."""
    e = episode(qwen, random.Random(0), 0, 1.0, ((1, 0), (0, 1)))
    assert grpo.token_vectors(rows([(e, 0.75)]))["advantage"].tolist() == [0.75, 0.75]


@pytest.mark.parametrize("kind", [float, np.float32])
def test_no_advantage_is_larger_than_the_square_root_of_the_group(kind):
    """E50: an advantage of thousands from a std that is not quite 0."""
    for rewards in ([0.35] * 7 + [-0.25], [0.7] * 7 + [0.7 + 1e-7], [1 / 3, np.float32(1 / 3)] * 4):
        assert max(map(abs, group_advantages([kind(r) for r in rewards], ["g"] * 8))) < 8**0.5


# -- loss of a token -------------------------------------------------------------------------------------


def test_clipped_loss_and_its_gradient_by_hand():
    """E44 with a symmetric clip of 0.2: bounds or min/max swapped."""
    cases = [  # ratio, advantage, objective, does a gradient flow?
        (1.25, 1, 1.2, False), (1.15, 1, 1.15, True), (0.7, 1, 0.7, True), (1.35, 1, 1.2, False),
        (0.7, -1, -0.8, False), (1.5, -1, -1.5, True), (0.85, -1, -0.85, True), (1.0, 2, 2.0, True),
    ]  # fmt: skip
    ratio, advantage, objective, flows = (torch.tensor(column) for column in zip(*cases, strict=True))
    old = torch.full_like(ratio, -1.5)
    logps = (old + ratio.log()).requires_grad_()
    losses, clipped = clipped_loss(logps, old, advantage.float(), clip=0.2)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx((-objective).tolist(), abs=1e-5)
    assert clipped.tolist() == (~flows).tolist()
    assert logps.grad.tolist() == pytest.approx((-ratio * advantage * flows).tolist(), abs=1e-5)


# -- loss of a minibatch ---------------------------------------------------------------------------------


def test_the_loss_is_one_mean_over_all_sampled_tokens(qwen):
    """E41: at ratio 1, one good token and five bad ones: (5 - 1) / 6 of an advantage; a mean of row means gives 0."""
    rng = random.Random(0)
    episodes = [episode(qwen, rng, 0, 1.0, ((1, 0),)), episode(qwen, rng, 0, 0.0, ((3, 2),))]
    _, metrics = gradients(qwen, episodes)
    assert metrics["loss"] == pytest.approx(4 / 6 * 0.5 / (0.5**0.5 + 1e-6), abs=1e-5)


def test_gradients_do_not_depend_on_the_split_into_micro_batches(qwen):
    """E40: mean of micro-batch means.  1x8 == 2x4 == 8x1, and a split with a partial last piece."""
    rng = random.Random(1)
    episodes = [episode(qwen, rng, i % 2, float(i < 3), ((1 + i, 2),)) for i in range(8)]
    longest = max(len(e.ids) for e in episodes)
    pieces, found = [], []
    for count in (8, 4, 3, 1):
        small = replace(LOOSE, micro_tokens=longest * count if count > 1 else 1)
        pieces.append([len(p) for p in grpo.micro_batches(rows((e, 1.0) for e in episodes), small.micro_tokens)])
        found.append(gradients(qwen, episodes, small)[0])
    assert pieces[0] == [8] and pieces[-1] == [1] * 8 and len(set(map(len, pieces))) == 4
    for other in found[1:]:
        assert all(torch.allclose(a, b, atol=1e-6, rtol=0) for a, b in zip(found[0], other, strict=True))
    assert max(g.abs().max() for g in found[0]) > 1e-3


def reference_gradients(pi, episodes, clip=0.2):
    """The formula of grpo.py's docstring, in float64, token by token, with the model's own full logits."""
    model = copy.deepcopy(pi.model).double()
    loss, count = 0.0, 0
    for e in episodes:
        mine = [x.reward for x in episodes if x.group == e.group]
        advantage = (e.reward - np.mean(mine)) / (np.std(mine, ddof=1) + 1e-6)
        logits = model(input_ids=torch.tensor([e.ids])).logits[0]
        for t in range(1, len(e.ids)):
            if e.mask[t]:
                rho = (torch.log_softmax(logits[t - 1] / e.temps[t], -1)[e.ids[t]] - e.logprobs[t]).exp()
                loss = loss - torch.minimum(rho * advantage, rho.clamp(1 - clip, 1 + clip) * advantage)
                count += 1
    (loss / count).backward()
    return [p.grad for p in model.parameters()], (loss / count).item()


def test_gradients_are_those_of_the_formula_on_and_off_policy(pi):
    """D32, D36, E40, F52: shift, ragged rows, token count and temperature, against an independent float64 reference."""
    episodes = batch(pi)
    moved = [replace(e, logprobs=[p + random.Random(i + t).uniform(-0.5, 0.5) * m
                                  for t, (p, m) in enumerate(zip(e.logprobs, e.mask, strict=True))])
             for i, e in enumerate(episodes)]  # fmt: skip
    for data in (episodes, moved):
        got, metrics = gradients(pi, data)
        want, loss = reference_gradients(pi, data)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        scale = max(g.abs().max().item() for g in want)
        for g, w in zip(got, want, strict=True):
            assert torch.allclose(g.double(), w, atol=1e-5 * scale, rtol=1e-4)
    assert metrics["clip_fraction"] > 0.1  # the moved ones did reach the clip


def test_prompt_and_observation_tokens_are_never_targets(qwen):
    """D35: environment text is trained.  What is stored at unsampled places has no effect, nor ids no reply saw."""
    episodes = batch(qwen)
    junk = [
        replace(
            e,
            logprobs=[p if m else -7.0 for p, m in zip(e.logprobs, e.mask, strict=True)],
            temps=[t if m else 0.0 for t, m in zip(e.temps, e.mask, strict=True)],
            segments=[s if m else STRATEGY for s, m in zip(e.segments, e.mask, strict=True)],
            ids=e.ids[:-3] + [7, 8, 9],  # the last observation
        )
        for e in episodes
    ]
    a, metrics_a = gradients(qwen, episodes)
    b, metrics_b = gradients(qwen, junk)
    assert same(a, b) and metrics_a == metrics_b
    changed = [replace(e, ids=e.ids[:5] + [9 if e.ids[5] != 9 else 8] + e.ids[6:]) for e in episodes]  # a sampled one
    assert not same(a, gradients(qwen, changed)[0])


def test_an_episode_without_sampled_tokens_changes_nothing_and_divides_by_nothing(qwen):
    """D34: NaN when a row, or a micro-batch, has nothing to train on."""
    silent = Episode(TASK, Reflection(), 0, reward=0.0, turns=[Turn("", "", "", "stop")])
    silent.extend([5, 6, 7], False)
    spoken = episode(qwen, random.Random(0), 0, 1.0)
    got, metrics = gradients(qwen, [spoken, silent], replace(LOOSE, micro_tokens=1))
    assert all(torch.isfinite(g).all() for g in got) and metrics["skipped_steps"] == 0
    assert max(g.abs().max() for g in got) > 0


# -- which episodes take part ----------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_all_equal_groups_change_no_weight(qwen, reward):
    """E42, E51, paper.md 9: bitwise, also when the optimiser has momentum from before."""
    optimizer = adamw(qwen)
    run(qwen, optimizer, batch(qwen))  # momentum
    before, moments = weights(qwen), copy.deepcopy(optimizer.state_dict())
    metrics = run(qwen, optimizer, batch(qwen, ((reward,) * 4, (reward,) * 4)))
    assert same(before, weights(qwen)) and metrics["optimizer_steps"] == metrics["kept"] == 0
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(moments["state"][i][k], after[i][k]) for i in after for k in after[i])


def test_groups_without_signal_are_dropped_whole_and_leave_no_trace(qwen):
    """E46, E51: filter by row; degenerate groups in the divisor."""
    mixed = batch(qwen, ((1, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0)))
    start = copy.deepcopy(qwen.model.state_dict())
    metrics = run(qwen, adamw(qwen), mixed)
    with_them = weights(qwen)
    qwen.model.load_state_dict(start)
    alone = run(qwen, adamw(qwen), mixed[:4])
    assert same(with_them, weights(qwen)) and metrics["kept"] == 4 / 12 and alone["kept"] == 1


def test_a_group_with_signal_is_kept_whole(qwen):
    """E46: the member whose reward is the group's mean has advantage 0, but its tokens still count in N."""
    _, metrics = gradients(qwen, batch(qwen, ((0, 0.5, 1),)))
    assert metrics["kept"] == 1


def test_split_advantage_groups_compare_reflected_episodes_among_themselves(qwen):
    rng = random.Random(0)
    kinds = [("plain", 1.0), ("plain", 0.0), ("negative", 0.0), ("negative", 0.0)]
    episodes = [episode(qwen, rng, 0, reward, mode=mode) for mode, reward in kinds]
    joint, split = (gradients(qwen, episodes, replace(LOOSE, advantage_groups=g)) for g in ("joint", "split"))
    assert joint[1]["kept"] == 1 and split[1]["kept"] == 0.5
    assert same(split[0], gradients(qwen, episodes[:2])[0]) and not same(split[0], joint[0])


def test_equal_tasks_in_two_groups_have_two_baselines(qwen):
    """E39, style.md (GRPO-Zero): groups keyed by prompt text merge.  Here both groups are all-equal."""
    rng = random.Random(0)
    episodes = [episode(qwen, rng, group, float(group)) for group in (0, 0, 1, 1)]
    assert run(qwen, adamw(qwen), episodes)["kept"] == 0


def test_no_episodes_is_no_update(qwen):
    """D34: division by an empty batch."""
    before = weights(qwen)
    metrics = run(qwen, adamw(qwen), [])
    assert same(before, weights(qwen)) and metrics["optimizer_steps"] == 0


@pytest.mark.parametrize("alpha", [0, 0.4])
def test_what_there_was_nothing_to_average_over_is_no_metric(qwen, alpha):
    """An update without signal has no entropy, loss or clip fraction: a 0 would read as a measurement."""
    rng, how = random.Random(0), UpdateSettings(entropy_alpha=alpha, ratio_tolerance=float("inf"))
    averages = {"loss", "clip_fraction", "grad_norm", "strategy_entropy", "action_entropy", "entropy_bonus"}
    equal = [episode(qwen, rng, group, 1.0) for group in (0, 0, 1, 1)]
    for nothing in ([], equal):
        assert not run(qwen, adamw(qwen), nothing, how).keys() & averages
    unequal = [episode(qwen, rng, 0, float(i % 2)) for i in range(4)]
    measured = run(qwen, adamw(qwen), unequal, how).keys() & averages
    assert measured == averages - (set() if alpha else {"entropy_bonus"})


def test_minibatches_hold_every_episode_once_and_enough_steps(qwen):
    """E48: a part of the batch is never seen, or twice (`batches[-2] += batches.pop()` wrote to the wrong place)."""
    made = rows((e, 1.0) for e in batch(qwen, ((1, 0, 0, 1, 0),) * 4))
    for steps in (1, 4, 7, 100):
        cut = grpo.minibatches(made, steps, torch.Generator().manual_seed(steps))
        assert sorted(id(row) for piece in cut for row in piece) == sorted(map(id, made))
        sizes = [sum(row.steps for row in piece) for piece in cut]
        assert all(size >= steps for size in sizes[:-1]) and (len(sizes) == 1 or sizes[-1] >= steps / 2)


# -- ratios ----------------------------------------------------------------------------------------------


def test_ratio_is_1_with_a_gradient_first_and_moves_later(qwen, monkeypatch):
    """E43: "old" log-probs recomputed at every pass, so that the ratio is always 1 and the clip never acts."""
    ratios = []

    def spy(logps, old, *rest, real=clipped_loss):
        ratios.append((logps - old).exp().detach())
        return real(logps, old, *rest)

    monkeypatch.setattr(grpo, "clipped_loss", spy)
    metrics = run(qwen, adamw(qwen, lr=0.05), batch(qwen), UpdateSettings(epochs=2))
    first, second = ratios
    assert (first - 1).abs().max() < 1e-5 and metrics["grad_norm"] > 1e-3
    assert (second - 1).abs().max() > 0.1 and metrics["clip_fraction"] > 0
    assert max(metrics["first_ratio_off_strategy"], metrics["first_ratio_off_action"]) < 1e-5


@pytest.mark.parametrize("segment", [STRATEGY, ACTION])
def test_a_wrong_temperature_in_one_segment_is_noticed(qwen, segment):
    """paper.md 9, F52: one scalar temperature for both segments."""
    episodes = [
        replace(e, temps=[1.0 if s == segment else t for t, s in zip(e.temps, e.segments, strict=True)])
        for e in batch(qwen)
    ]
    before = weights(qwen)
    with pytest.raises(FloatingPointError, match="ratio"):
        run(qwen, adamw(qwen), episodes)
    assert same(before, weights(qwen))


@pytest.mark.parametrize("segment", [STRATEGY, ACTION])
def test_a_first_ratio_that_is_not_a_number_is_noticed(qwen, segment):
    """grpo.py says "NaN fails too": max(0.0, nan) is 0.0 in Python."""
    episodes = batch(qwen)
    at = episodes[0].segments.index(segment)
    episodes[0].logprobs[at] = float("nan")
    with pytest.raises(FloatingPointError):
        run(qwen, adamw(qwen), episodes)


def test_episodes_of_temperature_0_are_refused(qwen):
    """B13: a clear rule for training on greedy tokens; zeros where nothing was sampled do not matter."""
    good = batch(qwen)
    good[0].temps[0] = 0.0  # in the prompt
    assert run(qwen, adamw(qwen), good)["optimizer_steps"] > 0
    bad = batch(qwen)
    bad[0].temps[bad[0].segments.index(ACTION)] = 0.0
    with pytest.raises(ValueError, match="temperature 0"):
        run(qwen, adamw(qwen), bad)


# -- a bad gradient --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_non_finite_gradient_skips_the_step_and_nothing_else(qwen, bad):
    """G68: it would poison weights and moments for good.  The second epoch goes on."""
    optimizer = adamw(qwen)
    run(qwen, optimizer, batch(qwen), UpdateSettings(epochs=1))
    before, moments = weights(qwen), copy.deepcopy(optimizer.state_dict()["state"])
    one = next(qwen.model.parameters())
    calls = []

    def poison(grad):
        calls.append(None)
        return grad * bad if len(calls) == 1 else grad

    handle = one.register_hook(poison)
    fresh = [relogged(qwen, e) for e in batch(qwen)]
    assert run(qwen, optimizer, fresh, UpdateSettings(epochs=1))["skipped_steps"] == 1
    assert same(before, weights(qwen))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(moments[i][k], after[i][k]) for i in after for k in after[i])
    calls.clear()
    metrics = run(qwen, optimizer, fresh, UpdateSettings(epochs=2))
    handle.remove()
    assert (metrics["skipped_steps"], metrics["optimizer_steps"]) == (1, 1)
    assert not same(before, weights(qwen)) and all(torch.isfinite(w).all() for w in weights(qwen))


def test_a_skipped_step_does_not_spoil_the_logged_gradient_norm(qwen):
    """G68, one step on: the mean norm of an update becomes NaN, which is no JSON either (metrics.jsonl)."""
    calls = []

    def poison(grad):
        calls.append(None)
        return grad * float("nan") if len(calls) == 1 else grad

    handle = next(qwen.model.parameters()).register_hook(poison)
    metrics = run(qwen, adamw(qwen), batch(qwen), UpdateSettings(epochs=2))
    handle.remove()
    assert metrics["skipped_steps"] == metrics["optimizer_steps"] == 1 and np.isfinite(metrics["grad_norm"])
