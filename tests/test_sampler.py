"""The sampler: every way of computing an episode gives the same episode, and tokens are drawn as promised.

Most tests are equivalences: batched == single, cached == uncached, compacted == not compacted.  Others
dictate what the model says (FIX-SCRIPT) and look at what becomes of it.  The entry of shared/faults.md
stands at the front of each docstring.

Entries of kinds A, B and F that cannot apply here, since the thing they are about is not there:
  B11, B18, F54   no nucleus, no top-k: always the full vocabulary
  A2              no left padding anywhere; the right-padded case is in test_policy.py
  A6              nothing is ever cropped from a cache; a row starts anew by its length (refill tests)
  A9              no row is ever fully masked; the finite-numbers part is tested
"""

import pytest
import torch

import sampler
from fixtures import (
    FORMATS,
    MODELS,
    ROTARY,
    SHORT,
    SIZE,
    VOCAB,
    Job,
    Policy,
    ReplyFormat,
    Sampling,
    ScriptedWorld,
    build,
    make_tokenizer,
    play,
    random_policy,
    reply_spans,
    rollout,
    scripted,
    task,
    use_scripted_world,
)
from sampler import ACTION, STRATEGY, RaggedCache, Rollout, forward, plan, ragged, sample

TEMPS = dict(strategy_temp=1.2, token_temp=0.7)
HOT = dict(TEMPS, strategy_tokens=5, reply_tokens=12)
GREEDY = dict(strategy_temp=0.0, token_temp=0.0, strategy_tokens=5, reply_tokens=12)
every_model = pytest.mark.parametrize("name", ["gpt2", "llama-tied", "qwen3"])


@pytest.fixture(autouse=True)
def world(monkeypatch):
    use_scripted_world(monkeypatch)


def ragged_tasks() -> list:
    """Prompts of different lengths, and up to three turns with observations of different lengths."""
    lengths = (2, 40, 9, 1, 17, 5, 30)
    return [task("q" * n, [f"see{n}", "*" + "ab" * (n % 13), "then *!"][: 3 - i % 3]) for i, n in enumerate(lengths)]


def full_logits(policy, ids: list[int]) -> torch.Tensor:
    """(len, V): the model's own forward pass over one row, no cache, no padding, no mask."""
    with torch.inference_mode():
        return policy.model.eval()(input_ids=torch.tensor([ids])).logits[0].float()


def assert_as_uncached(policy, episode, atol: float = 1e-4) -> None:
    """Recorded log-probs are those of an uncached pass, and at T = 0 the tokens are its likeliest."""
    logits = full_logits(policy, episode.ids)
    sampled = [t for t, m in enumerate(episode.mask) if m]
    assert sampled
    for t in sampled:
        if episode.temps[t] == 0:
            assert episode.ids[t] == logits[t - 1].argmax() and episode.logprobs[t] == 0
        else:
            logp = torch.log_softmax(logits[t - 1] / episode.temps[t], -1)[episode.ids[t]]
            assert abs(logp - episode.logprobs[t]) < atol


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * len(tokens)
    return ((torch.bincount(tokens, minlength=len(probs)) - expected) ** 2 / expected).sum().item()


CHI_2 = 18.4  # a true die with three faces exceeds this once in 10,000 tries

# ------------------------------------------------------------------------------------------------------
# A: batches, positions, the cache
# ------------------------------------------------------------------------------------------------------


@every_model
def test_batched_equals_single(name):
    """A1, A3: one position vector for the whole batch; a row changes with the length of its neighbours."""
    policy, tasks = random_policy(name), ragged_tasks()
    alone = [play(policy, [t], **GREEDY)[0] for t in tasks]
    assert len({len(e.ids) for e in alone}) > 3 and len({len(e.turns) for e in alone}) == 3  # ragged indeed
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 1, 4, 0, 2, 5, 3], [3, 1], [1, 3], [3, 0]):
        for i, episode in zip(order, play(policy, [tasks[i] for i in order], **GREEDY), strict=True):
            assert episode == alone[i]


@pytest.mark.parametrize("name", MODELS)
def test_cached_equals_uncached_over_ragged_turns(name):
    """A4: new tokens at position "cache length" instead of the row's own count."""
    policy = random_policy(name)
    for how in (HOT, GREEDY):
        for episode in play(policy, ragged_tasks(), **how):
            assert_as_uncached(policy, episode)


@every_model
def test_packed_passes_equal_uncached_rows(name):
    """A4, A7: ragged stretches of some rows and one token of others in one packed pass, over several passes."""
    model, draw = random_policy(name).model.eval(), torch.Generator().manual_seed(1)
    cache, ids = RaggedCache(model.config, 4, 60, model.dtype, "cpu"), [[], [], [], []]
    new = lambda n: torch.randint(3, VOCAB, (n,), generator=draw).tolist()  # noqa: E731
    # (rows that decode, {row: tokens it reads in the same pass})
    for n, reads in ((0, {0: 2, 1: 9, 3: 4, 2: 7}), (3, {}), (4, {2: 5, 0: 1}), (2, {3: 3}), (4, {1: 6})):
        stretches = [(r, len(ids[r]), count) for r, count in reads.items()]
        words = {r: new(count) for r, count in reads.items()}
        for r, w in words.items():
            ids[r] += w
        newest = new(n)
        at = plan(torch.tensor([len(ids[r]) for r in range(n)], dtype=torch.long), stretches, max(map(len, ids)) + 1, model.dtype)
        for r in range(n):
            ids[r].append(newest[r])
        with torch.no_grad():
            with ragged(model):
                hidden = forward(model.base_model, cache, torch.tensor(newest + sum(words.values(), []), dtype=torch.long), at)
            wanted = [model.base_model(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0] for row in ids]
        expected = [wanted[r][-1] for r in range(n)]
        for r, count in reads.items():
            stop = len(ids[r]) - (r < n)
            expected += list(wanted[r][stop - count : stop])
        torch.testing.assert_close(hidden, torch.stack(expected), atol=1e-4, rtol=1e-4)


@every_model
def test_shared_prompt_equals_own_prefill(name):
    """A5: branches of one prompt change each other through the cache they share."""
    policy, (t, other) = random_policy(name), (task("q" * 9, ["see", "and *", "or *"]), task("q", ["see", "so *"]))
    fed = []
    base = policy.model.base_model
    hook = base.register_forward_pre_hook(lambda m, a, k: fed.append(k["input_ids"]), with_kwargs=True)
    branches = play(policy, [t, t, other, t, t], **HOT)
    hook.remove()
    prompts = {tuple(e.ids[: e.mask.index(True)]) for e in branches}
    assert fed[0].shape[1] == sum(map(len, prompts)) and len(prompts) == 2  # two distinct prompts were read, not five
    assert len({tuple(e.ids) for e in branches}) == 5
    for episode in branches:
        assert_as_uncached(policy, episode)
    single = [play(policy, [x], **GREEDY)[0] for x in (t, other)]
    assert play(policy, [t, t, other, t, t], **GREEDY) == [single[0], single[0], single[1], single[0], single[0]]


def test_copied_rows_leave_their_source_alone():
    """A5: one cache object mutated in place while another branch relies on it."""
    cache = RaggedCache(random_policy("llama-tied").model.config, 4, 16, torch.float32, "cpu")
    for tensor in cache.keys + cache.values:
        tensor.normal_()
    before = [tensor.clone() for tensor in cache.keys + cache.values]
    cache.copy_from(cache, 0, 3, 5)
    for old, new in zip(before, cache.keys + cache.values, strict=True):
        assert new[3, :, :5].equal(old[0, :, :5]) and new[:, :, 5:].equal(old[:, :, 5:]) and new[:3].equal(old[:3])
    cache.keys[0][3] += 1
    assert cache.keys[0][0].equal(before[0][0])
    cache.grow(40)
    assert cache.capacity == 40 and cache.keys[1][3, :, :5].equal(before[1][0, :, :5])


def test_every_id_is_fed_once():
    """A7: ids that are in the cache are fed again, or the mask does not cover past + new tokens."""
    policy, fed = random_policy(), []

    def hook(module, args, kwargs):
        at = kwargs["ragged"]
        fed.extend(zip(at.slot.tolist(), kwargs["input_ids"][0].tolist(), strict=True))
        assert at.filled >= at.slot.max() + 1 and kwargs["position_ids"][0].equal(at.slot)
        assert ((at.bias == 0).sum(-1).flatten()).equal(at.slot[: at.n] + 1)  # each token sees exactly itself and its past
        if at.readers is not None:
            assert at.sees.sum(-1).flatten()[at.pack].equal(at.slot[at.n :] + 1)

    policy.model.base_model.register_forward_pre_hook(hook, with_kwargs=True)
    (episode,) = play(policy, [task("q" * 9, ["see", "and *", "or *"])], **HOT)
    # the prompt's last token is read twice (sampler.py: _start_episodes), the last reply's last one never
    prompt = episode.mask.index(True)
    expected = list(enumerate(episode.ids))[:-1]
    assert len(episode.turns) == 3 and sorted(fed) == sorted(expected + [expected[prompt - 1]])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_settings_of_the_tokenizer_play_no_part(side):
    """A8: padding side (and pad token) left to the tokenizer's default."""
    policy = random_policy()
    expected = play(policy, ragged_tasks(), **HOT)
    policy.tokenizer.padding_side, policy.tokenizer.pad_token = side, None
    assert play(policy, ragged_tasks(), **HOT) == expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_attention_implementation_and_precision(attention, dtype):
    """A9: masked rows turn to NaN in half precision, or a mask that only one implementation understands."""
    policy = random_policy("llama-tied", attn_implementation=attention)
    policy.model.to(dtype)
    for episode in play(policy, ragged_tasks(), **HOT):
        assert_as_uncached(policy, episode, 1e-4 if dtype == torch.float32 else 0.2)


OTHERS = {
    "mistral": ("Mistral", dict(ROTARY, sliding_window=None)),
    "gemma": ("Gemma", ROTARY),
    "local-attention": ("GPTNeo", dict(num_layers=2, num_heads=2, attention_types=[[["local"], 2]], window_size=8)),
    "renamed-kv-heads": ("Falcon", dict(SIZE, multi_query=True)),
    "scaled-logits": ("Granite", dict(ROTARY, logits_scaling=8.0)),
    "capped-logits": ("NanoChat", dict(ROTARY, final_logit_softcapping=2.0)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_right_or_refused(name):
    """A3, F52: a model with more to it than the cache or the head knows is sampled wrongly, without a word."""
    kind, settings = OTHERS[name]
    model = build(kind, **settings)
    try:
        policy = Policy(model, make_tokenizer(), SHORT, brief=True)
    except ValueError as refusal:
        assert model.config.model_type in str(refusal)
        return
    for episode in play(policy, ragged_tasks(), **HOT):
        assert_as_uncached(policy, episode)


class AlwaysMoving(Rollout):
    """Moves the running rows about before every pass, instead of when one has ended."""

    def _feed(self):
        if len(self.rows) < len(self.newest):  # there is a free row of the cache: the last one goes there, the first to its place
            self.rows.append(None)
            free, last = len(self.rows) - 1, len(self.rows) - 2
            self._move(self.rows[last], free)
            self._move(self.rows[0], last)
            self._move(self.rows[free], 0)
            self.rows.pop()
        return super()._feed()


@every_model
def test_compacted_equals_not_compacted(name, monkeypatch):
    """B17: a row's state is lost or mixed up when ended rows are dropped from the batch."""
    policy, tasks = random_policy(name), ragged_tasks() * 2
    expected = [play(policy, [t], **GREEDY)[0] for t in tasks]  # one row: there is nothing to compact
    assert play(policy, tasks, **GREEDY) == expected
    monkeypatch.setattr(sampler, "Rollout", AlwaysMoving)
    assert play(policy, tasks, **GREEDY) == expected
    for episode in play(policy, tasks, **HOT):
        assert_as_uncached(policy, episode)


@every_model
@pytest.mark.parametrize("rows", [1, 3])
def test_refilled_equals_not_refilled(name, rows):
    """A6, B17: a row that takes over an ended one's place still sees something of it."""
    policy, tasks = random_policy(name), ragged_tasks() * 2
    assert play(policy, tasks, rows=rows, **GREEDY) == play(policy, tasks, **GREEDY)
    for episode in play(policy, tasks, rows=rows, **HOT):
        assert_as_uncached(policy, episode)


def test_prompts_read_in_several_passes(monkeypatch):
    """A3: a prompt changes with the prompts that are read in the same pass."""
    policy, tasks = random_policy(), ragged_tasks()
    expected = play(policy, tasks, **GREEDY)
    monkeypatch.setattr(sampler, "PROMPT_TOKENS", 50)
    assert play(policy, tasks, **GREEDY) == expected


def test_a_format_without_a_strategy_is_all_action():
    """B11: the first token of a reply counted and sampled as a strategy although there is none."""
    policy = scripted({"q": ["ab", "cd"]}, form=FORMATS["none"])
    (episode,) = play(policy, [task("q", ["see", "and *"])], **HOT)
    assert {s for s, m in zip(episode.segments, episode.mask, strict=True) if m} == {ACTION}
    assert [t for t, m in zip(episode.temps, episode.mask, strict=True) if m] == pytest.approx([0.7] * sum(episode.mask))
    assert [(t.strategy, t.action) for t in episode.turns] == [("", "ab"), ("", "cd")]


def test_compiled_decoding_meets_few_shapes_and_changes_nothing(monkeypatch):
    """A9: with `compile` the decode step is padded to few shapes and reading is a pass of its own; all but torch.compile
    itself is tested here, with a stand-in that notes the shapes."""
    policy, tasks = random_policy("llama-tied"), ragged_tasks() * 12
    expected = play(policy, tasks, rows=40, **GREEDY)
    shapes = set()

    def stand_in(body, dynamic):
        def compiled(**inputs):
            assert inputs["ragged"].readers is None
            shapes.add((inputs["input_ids"].shape, inputs["ragged"].bias.shape))
            return body(**inputs)

        return compiled

    monkeypatch.setattr(torch, "compile", stand_in)
    assert play(policy, tasks, rows=40, compile=True, **GREEDY) == expected
    assert 1 < len(shapes) <= 3 * 2  # rows in sixteens up to 40, slots in 128s up to 256
    for episode in play(policy, tasks, rows=40, compile=True, **HOT):
        assert_as_uncached(policy, episode)


# ------------------------------------------------------------------------------------------------------
# B: temperatures and seeds
# ------------------------------------------------------------------------------------------------------


def test_draws_follow_each_rows_own_temperature():
    """B10: one row's temperature rules the batch, or the batched path is greedy."""
    logits, temps = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0, 1e-8, 0.5, 0.7, 1, 2]).repeat(4000)
    temps = temps[torch.randperm(len(temps), generator=torch.Generator().manual_seed(5))]
    tokens, logps = sample(logits.expand(len(temps), 3), temps, torch.Generator().manual_seed(6))
    for t in (0, 1e-8):
        assert (tokens[temps == t] == 0).all() and (logps[temps == t] == 0).all()
    for t in (0.5, 0.7, 1, 2):
        probs, mine = torch.softmax(logits / t, -1), tokens[temps == t]
        assert chi_square(mine, probs) < CHI_2
        torch.testing.assert_close(logps[temps == t], probs.log()[mine])
    assert chi_square(tokens[temps == 2], torch.softmax(logits, -1)) > CHI_2  # the test can tell T = 2 from 1


def test_temperature_switches_inside_a_reply():
    """B10, F52: action tokens drawn (or recorded) at the strategy's temperature, or the other way round."""
    policy = scripted({})
    abc, logits = policy.encode_text("a.b.c")[::2], torch.full((VOCAB,), -1e4)
    logits[abc] = torch.tensor([2.0, 1.0, 0.0])
    policy.model.rule = lambda seen: logits
    episodes = play(policy, [task("1", ["go"])] * 300, strategy_tokens=4, reply_tokens=8, **TEMPS)
    tokens = torch.tensor([e.ids[-8:] for e in episodes])
    logps = torch.tensor([e.logprobs[-8:] for e in episodes])
    temps = torch.tensor([e.temps[-8:] for e in episodes])
    assert temps.equal(torch.tensor([1.2] * 4 + [0.7] * 4).expand(300, 8))
    assert all(e.segments[-8:] == [STRATEGY] * 4 + [ACTION] * 4 for e in episodes)
    for half, t in ((slice(0, 4), 1.2), (slice(4, 8), 0.7)):
        which = torch.searchsorted(torch.tensor(abc), tokens[:, half].flatten())  # a, b, c have ids in a row
        assert chi_square(which, torch.softmax(torch.tensor([2.0, 1.0, 0.0]) / t, -1)) < CHI_2
        torch.testing.assert_close(logps[:, half], torch.log_softmax(logits / t, -1)[tokens[:, half]])


def test_settings_shipped_with_a_model_play_no_part():
    """B12: top_k or a repetition penalty of the model's generation_config narrows what is explored."""
    policy = random_policy(stop_every=999)
    policy.model.generation_config.update(top_k=2, top_p=0.1, repetition_penalty=5.0, temperature=0.01, do_sample=True)
    episodes = play(policy, [task("q", ["see"])] * 300, strategy_temp=5.0, reply_tokens=1)
    assert len({e.ids[-1] for e in episodes}) > 60
    for episode in episodes[:20]:
        assert_as_uncached(policy, episode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_temperatures_give_no_nan(dtype):
    """B13: division by T without a greedy branch, overflow in low precision."""
    logits = (20 * torch.randn(400, VOCAB, generator=torch.Generator().manual_seed(0))).to(dtype)
    temps = torch.tensor([0, 1e-8, 1e-4, 1.0]).repeat(100)
    tokens, logps = sample(logits, temps, torch.Generator().manual_seed(0))
    likeliest = logits.float().gather(1, tokens[:, None])[:, 0] == logits.float().amax(1)  # bf16 logits have ties
    assert likeliest[temps < 1e-3].all() and not likeliest[temps == 1].all()
    assert logps.isfinite().all() and (logps <= 0).all() and (logps[temps == 0] == 0).all()


def test_impossible_tokens_are_never_drawn(monkeypatch):
    """B13: the cumulative sum ends below 1, or u = 0 falls on a first token of probability 0."""
    logits = torch.full((1, 50), -torch.inf)
    logits[0, 20:30] = torch.linspace(0, 3, 10)
    tokens, _ = sample(logits.expand(20000, -1), torch.ones(20000), torch.Generator().manual_seed(0))
    assert tokens.unique().tolist() == list(range(20, 30))
    zeros = torch.zeros(1, 1, dtype=torch.float64)
    for u, edge in ((zeros, 0), (zeros + 1 - 2**-53, -1)):  # the lowest and the highest number there is
        monkeypatch.setattr(torch, "rand", lambda *a, u=u, **k: u)
        for n in range(1, 60):  # the rounded probabilities of n equal faces add up to a bit more or less than 1
            logits = torch.tensor([[-torch.inf] + [0.0] * n + [-torch.inf]])
            assert sample(logits, torch.ones(1), None)[0].item() == range(1, n + 1)[edge]


def test_same_seed_same_episodes_and_global_streams_untouched():
    """B19: draws depend on something else than the generator that was given."""
    policy, before = random_policy(), torch.get_rng_state()
    first = play(policy, ragged_tasks(), seed=3, **HOT)
    torch.manual_seed(9)
    assert play(policy, ragged_tasks(), seed=3, **HOT) == first
    assert play(policy, ragged_tasks(), seed=4, **HOT) != first
    torch.set_rng_state(before)
    play(policy, ragged_tasks(), seed=3, **HOT)
    assert torch.get_rng_state().equal(before)


# ------------------------------------------------------------------------------------------------------
# B: where a reply ends
# ------------------------------------------------------------------------------------------------------


def test_stops_are_looked_for_row_by_row():
    """B14: one row's stop ends all rows, or a stop text that straddles two rows is found."""
    hash_, dot = scripted({}).encode_text("#.")
    policy = scripted({"0": [[dot] * 7 + [hash_]], "1": [[hash_, dot, 2]], "2": [[dot] * 5 + [2]]})
    episodes = play(policy, [task(m, ["go"]) for m in "012"], reply_tokens=8)
    assert [sum(e.mask) for e in episodes] == [8, 3, 6]
    assert [e.turns[0].finish for e in episodes] == ["length", "stop", "stop"]


def say(form: ReplyFormat, pieces: list[str], observation: str):
    """Let a row say the pieces, each encoded by itself, and dots after them.  Returns (episode, ids of the pieces)."""
    said = [scripted({}).encode_text(piece) for piece in pieces]
    policy = scripted({"1": [sum(said, [])]}, form=form)
    (episode,) = play(policy, [task("1", [observation])], reply_tokens=40, strategy_tokens=30, **TEMPS)
    return episode, sum(said, [])


@pytest.mark.parametrize(
    "stop, pieces",
    [
        ("</act>", ["a", "</", "act", ">x"]),
        ("</act>", ["a", "<", "/", "a", "c", "t", ">"]),
        ("終わり", ["a", "終わり"]),  # nine tokens of a byte each
        ("###", ["a", "##", "#"]),
        ("###", ["a", "###"]),
        ("# ", ["a", "#", " "]),
    ],
)
def test_stop_text_is_found_wherever_token_borders_fall(stop, pieces):
    """B15: a stop text is missed when it is spread over several tokens; one in the prompt ends the reply."""
    episode, said = say(ReplyFormat("<", "></", "", "", (stop,)), pieces, f"{stop} is in the prompt {stop}")
    ((start, end),) = reply_spans(episode)
    assert episode.ids[start:end] == said and episode.turns[0].finish == "stop"
    assert len(episode.ids) == len(episode.mask) == len(episode.logprobs) == end


@pytest.mark.parametrize(
    "closing, pieces, hot",
    [
        ("</act>", ["a", "</", "act", ">x", "b"], 4),  # the completing token holds more than the delimiter
        ("</act>", ["<", "/", "a", "c", "t", ">", "b"], 6),
        ("行動", ["a", "行動", "b"], 7),  # six tokens of a byte each
        ("ab", ["a", "b", "c"], 2),
        ("ab", ["ab", "c"], 1),
        ("a b", ["a", " ", "b", "c"], 3),
    ],
)
def test_reply_turns_cool_after_the_token_that_completes_the_delimiter(closing, pieces, hot):
    """B15, B10: the switch is missed, or comes early or late, when the delimiter is several tokens."""
    episode, said = say(ReplyFormat("<", closing, "", "", ("##",)), [*pieces, "##"], f"{closing} {closing}")
    ((start, end),) = reply_spans(episode)
    assert episode.ids[start:end] == said
    assert episode.temps[start:end] == pytest.approx([1.2] * hot + [0.7] * (end - start - hot))
    assert episode.segments[start:end] == [STRATEGY] * hot + [ACTION] * (end - start - hot)


def test_every_listed_end_of_turn_id_stops():
    """B16: only the tokenizer's eos is honoured, not the lists in the model's two configs."""
    policy = scripted({"1": [[9, 7]], "2": [[9, 9, 2]], "3": [[5]], "4": [[9, 6, 2]]}, eos=7, generation_eos=[5, 2])
    episodes = play(policy, [task(m, ["go"]) for m in "1234"], reply_tokens=9)
    assert [e.ids[a:b] for e in episodes for a, b in reply_spans(e)] == [[9, 7], [9, 9, 2], [5], [9, 6, 2]]
    assert {e.turns[0].finish for e in episodes} == {"stop"}


def test_rows_keep_their_own_state_through_compaction_and_refill():
    """B17: rows and what belongs to them fall out of step when ended rows leave the batch."""
    said = {str(i): [f"{'p' * i}></{'a' * (7 - t) + m}" for t, m in enumerate("xyz"[: 1 + i % 3])] for i in range(8)}
    policy = scripted(said)
    tasks = [task(m, ["go"] + ["you did *"] * (len(turns) - 1), reward=int(m) % 2) for m, turns in said.items()]
    for rows in (8, 3):
        for (m, turns), t, e in zip(said.items(), tasks, play(policy, tasks, rows=rows, **TEMPS), strict=True):
            assert e.task is t and e.reward == int(m) % 2 and e.outcome == turns[-1].split("></")[1]
            assert [f"{turn.strategy}></{turn.action}" for turn in e.turns] == turns
            assert [turn.observation for turn in e.turns][1:] == [f"you did {x.split('></')[1]}" for x in turns[:-1]]
            for (a, b), turn in zip(reply_spans(e), turns, strict=True):
                hot = len(policy.encode_text(turn.split("></")[0])) + 2
                assert e.temps[a:b] == pytest.approx([1.2] * hot + [0.7] * (b - a - hot))
                assert b - a == len(policy.encode_text(turn)) + 1


def test_strategy_that_never_ends_turns_cool_and_the_reply_is_cut():
    """B14, H73: no delimiter, no end of turn: caps on both, and no action is made up."""
    policy = scripted({"1": [[9] * 99, "x></y"], "2": [[9] * 3 + [2], "x></y"]})
    cut, short = play(policy, [task(m, ["go", "?*?"]) for m in "12"], strategy_tokens=6, reply_tokens=10, **TEMPS)
    (a, b), _ = reply_spans(cut)
    assert b - a == 10 and cut.temps[a:b] == pytest.approx([1.2] * 6 + [0.7] * 4)
    assert cut.segments[a:b] == [STRATEGY] * 6 + [ACTION] * 4
    assert [(t.finish, t.action) for t in cut.turns] == [("length", ""), ("stop", "y")]
    (a, b), _ = reply_spans(short)
    assert short.segments[a:b] == [STRATEGY] * 4 and short.turns[0].finish == "stop" and short.turns[0].action == ""
    assert ScriptedWorld.steps.count(("scripted/1", "")) == 1


def test_end_of_turn_on_the_last_allowed_token_is_no_cut():
    """H73: a reply that ends exactly at its cap counts as truncated."""
    policy = scripted({"1": [[9] * 5 + [2]], "2": [[9] * 6]})
    done, cut = play(policy, [task(m, ["go"]) for m in "12"], reply_tokens=6)
    assert (done.turns[0].finish, cut.turns[0].finish) == ("stop", "length") and sum(done.mask) == sum(cut.mask) == 6


# ------------------------------------------------------------------------------------------------------
# H, G: the room that is left, worlds, modes
# ------------------------------------------------------------------------------------------------------


def prompt_length(t) -> int:
    policy = scripted({})
    return len(policy.prompt_ids("scripted", t, t.spec["says"][0]))


def test_reply_is_cut_where_the_context_ends():
    """H73: history + next reply exceed the window; a finished episode keeps its reward."""
    t = task("1", ["go"])
    policy = scripted({"1": [[9] * 99]}, context=prompt_length(t) + 5)
    (episode,) = play(policy, [t], reply_tokens=20)
    assert len(episode.ids) == policy.context and sum(episode.mask) == 5
    assert (episode.turns[0].finish, episode.finish, episode.reward) == ("length", "success", 1.0)


@pytest.mark.parametrize("room, turns", [(0, 1), (1, 2), (2, 2)])
def test_observation_without_room_ends_the_episode(room, turns):
    """H73: an observation longer than the rest; one that leaves room for exactly one token."""
    t, reply = task("1", ["go", "o" * 20]), [9] * 3 + [2]
    glue = len(scripted({}).turn_ids("o" * 20, last_id=2))
    policy = scripted({"1": [reply, reply]}, context=prompt_length(t) + len(reply) + glue + room)
    (episode,) = play(policy, [t], reply_tokens=20)
    assert len(episode.turns) == turns and len(ScriptedWorld.steps) == turns
    if turns == 1:
        assert episode.finish == "context" and episode.mask[-1] and episode.reward == 0
    else:
        assert len(episode.ids) == policy.context and sum(episode.mask) == len(reply) + room
        assert episode.finish == "success"


def test_prompt_without_room_is_refused():
    """H73: a prompt that fills the window gets a negative budget."""
    t = task("1", ["go"])
    with pytest.raises(ValueError, match="context"):
        play(scripted({"1": ["x"]}, context=prompt_length(t)), [t])


@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_rows_at_the_models_last_position_next_to_short_ones(name):
    """H73, A3: filling up short rows must neither leave the position table nor change anybody's result."""
    policy = random_policy(name, stop_every=50, max_position_embeddings=80)
    tasks = [task("q" * n, ["see", "*" + "o" * m, "o" * m, "*"]) for n in (1, 20, 39) for m in (0, 9, 18)]
    alone = [play(policy, [t], **GREEDY)[0] for t in tasks]
    assert {"context", "success"} == {e.finish for e in alone} and max(len(e.ids) for e in alone) == 80
    assert play(policy, tasks, **GREEDY) == alone
    for episode in play(policy, tasks, **HOT):
        assert len(episode.ids) <= 80
        assert_as_uncached(policy, episode)


def test_world_is_not_stepped_after_its_end():
    """H79: one more reply after the world has ended the episode."""
    policy = scripted({m: ["x></y"] * 9 for m in "123"})
    episodes = play(policy, [task(m, ["go"] * int(m), reward=0.0) for m in "123"], rows=2)
    assert [len(e.turns) for e in episodes] == [1, 2, 3] == [len(reply_spans(e)) for e in episodes]
    assert len(ScriptedWorld.steps) == 6 and all(e.mask[-1] and e.finish == "failure" for e in episodes)


def test_first_observation_stands_in_the_prompt_once():
    """H80: the text that reset() returns never reaches the prompt."""
    policy = scripted({"1": ["x></y"]})
    (episode,) = play(policy, [task("1", ["a quite special sight"])])
    assert policy.decode(episode.ids).count("a quite special sight") == 1
    assert episode.turns[0].observation == "a quite special sight"


@pytest.mark.parametrize("training", [True, False])
def test_model_mode_during_and_after(training):
    """G63, F53: dropout acts while sampling, or the mode is not given back (after an error, too)."""
    policy, modes = random_policy(), []
    policy.model.train(training).base_model.register_forward_pre_hook(lambda m, a: modes.append(m.training))
    play(policy, ragged_tasks(), **HOT)
    assert policy.model.training is training
    with pytest.raises(RuntimeError, match="the world broke"):
        play(policy, [task("q", ["see", "*"], breaks=True)], **HOT)
    assert policy.model.training is training and modes and not any(modes)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # its name is about to change
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_gradient_checkpointing_does_not_lose_the_cache(name):
    """G67: use_cache is dropped when checkpointing is on in training mode."""
    policy = random_policy(name)
    expected = play(policy, ragged_tasks(), **HOT)
    policy.model.gradient_checkpointing_enable()
    policy.model.train()
    assert play(policy, ragged_tasks(), **HOT) == expected


def test_no_jobs_and_one_callback_per_episode():
    """H73: an empty list of jobs; progress counts every episode once."""
    policy, jobs, ticks = random_policy(), [Job(t) for t in ragged_tasks()], []
    assert play(policy, []) == []
    rollout(policy, "scripted", jobs, Sampling(rows=2, **HOT), torch.Generator(), tick=lambda: ticks.append(1))
    assert len(ticks) == len(jobs)
