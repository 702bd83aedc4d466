"""The policy: a causal language model with its tokenizer, and the way between text and token ids.

In the paper's terms this file is pi (SGE 3.2): one network that writes a strategy s_t and then an action
a_t given the observation o_t.  It holds

  Policy            model + tokenizer; prompt -> ids, observation -> ids, reply text -> (strategy, action)
  token_logprobs    log-probs of sampled tokens, each at the temperature it was drawn with (SGE 3.3)
  MasterAdamW       AdamW for weights kept in bfloat16
  build_tiny        the embedded default model, built from nothing and warm-started on a scripted behaviour
  load_policy       any local or hub model, a .gguf file, or the tiny one

Two rules hold throughout.  *Tokens in, tokens out*: a conversation is a list of ids that only grows;
sampled ids are never decoded and encoded again.  *Text is only text*: what a world or an earlier episode
says is encoded such that it cannot become a control token, whatever it spells.

How this differs from the paper:
  1. The default model has 0.6 million weights, not 4 billion, and knows nothing but one small world.
     Its "pretraining" is next-token loss on the replies of that world's scripted behaviour (envs.py).
  2. An episode is ONE conversation, so that all its steps share a prefix; earlier strategies stay in the
     context (the paper leaves that open, README list no. 10).

Try it:  python policy.py            builds the tiny base of the house world and prints one conversation
"""

import hashlib
import importlib.util
import inspect
import json
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jinja2
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from tokenizers import decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import envs
from reflection import FORMATS, PLAIN, Reflection, ReplyFormat, instruction, parse_reply

transformers.utils.logging.disable_progress_bar()  # the bars of loading and saving, not ours

# ------------------------------------------------------------------------------------------------------
# model + tokenizer
# ------------------------------------------------------------------------------------------------------


class Policy:
    """A Hugging Face causal LM and its tokenizer, with everything needed to talk and to listen.

    model: returns logits for `input_ids`; tokenizer: a fast one with a chat template.
    form: how a reply is laid out (reflection.FORMATS).  brief: whether prompts use the tiny model's wording.
    Raises ValueError, in one line, for a model or tokenizer that cannot be used.
    """

    def __init__(self, model, tokenizer, form: ReplyFormat = FORMATS["header"], brief: bool = False):
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError("the tokenizer is not a fast one: save it with a tokenizer.json first")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template: use an instruct/chat model, or set tokenizer.chat_template")
        check_attention(model.config)
        check_head(model)
        self.model, self.tokenizer, self.form, self.brief = model, tokenizer, form, brief
        self.vocab = model.get_output_embeddings().weight.shape[0]  # may be larger than the tokenizer's
        self.context = getattr(model.config, "max_position_embeddings", None) or 1 << 30
        self.control = control_ids(tokenizer)
        self.stop_ids = self._find_stop_ids()
        self._plain = plain_tokenizer(tokenizer)
        self._encoded: dict[str, list[int]] = {}
        self._tables: dict[tuple, torch.Tensor] = {}
        self._lead, self._head, self._between, self._tail = self._template_pieces()
        if self._between and self._between[0] in self.control:  # the template's end-of-turn, named elsewhere or not
            self.stop_ids = sorted({*self.stop_ids, self._between[0]})
        if form.closing not in self.decode(self._encode_template(form.closing)):
            raise ValueError(f"{form.closing!r} is a control token of this tokenizer: use another --strategy-format")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    # -- text -> ids -----------------------------------------------------------------------------------

    def encode_text(self, text: str) -> list[int]:
        """Ids of a message that came from outside: no spelling in it becomes a control token.

        They are the ids that the text has in the middle of a rendered conversation: with the space that the
        template puts before it, if any, and without one that the tokenizer would put before a whole text.
        """
        if text not in self._encoded:  # small worlds say the same things over and over
            if len(self._encoded) > 100_000:
                self._encoded.clear()
            self._encoded[text] = self._encode_plain(self._lead + text)
        return list(self._encoded[text])

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token.

        `_plain` has forgotten its added tokens, but they may stand in its vocabulary all the same (Unigram
        likes them best of all): a word that became one is cut after its first character and read again.
        """
        encoding = self._plain.encode(text, add_special_tokens=False)
        found = [span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i in self.control]
        cuts = [start + 1 for start, stop in found if stop - start > 1]
        if cuts:
            return [i for a, b in pairwise([0, *cuts, len(text)]) for i in self._encode_plain(text[a:b])]
        # what is left of them is one character that cannot be said in another way: it is left out
        return [i for i in encoding.ids if i not in self.control]

    def _encode_template(self, text: str) -> list[int]:
        """Ids of the template's own text, in which control tokens are what they look like."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt_ids(self, world: str, task: envs.Task, observation: str, reflection: Reflection = PLAIN) -> list[int]:
        """The prompt of an episode's first step: one user message, then the start of the agent's reply.

        Reflection replaces the plain strategy instruction (SGE 3.2, A.1).  The strategy's opening header
        is the last thing in the prompt, so it is not sampled.
        """
        about = envs.INSTRUCTIONS[world]["brief" if self.brief else "full"]
        parts = [about, instruction(reflection, self.form, self.brief), task.instruction, observation]
        return self._head + self.encode_text("\n".join(p for p in parts if p)) + self._tail

    def turn_ids(self, observation: str, last_id: int) -> list[int]:
        """What goes between a reply whose last id is `last_id` and the agent's next strategy.

        = the template's glue after a reply (its end-of-turn token only if the reply did not sample it)
        + the observation + the start of the next reply.  None of these ids is ever trained on.
        """
        glue = self._between[1:] if self._between and self._between[0] == last_id else self._between
        return glue + self.encode_text(observation) + self._tail

    def _template_pieces(self) -> tuple[str, list[int], list[int], list[int]]:
        """Find the template's own ids around messages: render marked ones, encode, and cut at the marks' ids.

        Returns (a) the space, if any, that belongs to a user message's first word, and the ids (b) before the
        first user message, (c) from the end of a reply to the start of the next user message, (d) from the end
        of a user message to the start of the strategy.

        Cutting ids, not text, keeps what a tokenizer does at borders: "[INST] hi" may be "[", "INST", "]", " hi".
        Of templates that take thoughts out of earlier replies, only this glue is used: our conversation is
        append-only, so earlier replies stay as they were sampled.
        """
        first, reply, second = "First0message", "Reply0message", "Second0message"
        turns = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": second},
        ]
        start, whole = self._render(turns[:1]), self._render(turns)
        if [start.count(first)] + [whole.count(m) for m in (first, reply, second)] != [1, 1, 1, 1]:
            raise ValueError("the chat template does not keep messages as they are: such templates are not supported")
        tail = start.split(first)[1]
        if not whole.endswith(tail):
            raise ValueError("the chat template rewrites earlier turns: such templates are not supported")
        opening = self._opening(tail, whole.split(first)[1].split(reply)[0])
        lead, head, tail = self._cut(self._encode_template(start + opening), first)
        lead_then, head_then, rest = self._cut(self._encode_template(whole + opening), first)
        _, _, rest = self._cut(rest, reply)
        lead_next, between, tail_then = self._cut(rest, second)
        if (head_then, tail_then, lead_then, lead_next) != (head, tail, lead, lead):
            raise ValueError("the chat template rewrites earlier turns: such templates are not supported")
        bos = self.tokenizer.bos_token_id
        # exactly one begin-of-sequence token: the template's, or else the one the tokenizer would add
        if bos is not None and bos in self.tokenizer.encode("") and head[:1] != [bos]:
            head = [bos] + head
        return lead, head, between, tail

    def _opening(self, tail: str, before_reply: str) -> str:
        """What to write after the template's generation prompt `tail`, so that the strategy can begin.

        before_reply: what the template has between a user message and the reply to it.
        """
        ours = self.form.opening
        if self._thinks and tail.rstrip().endswith(ours.rstrip()):
            return ""  # the template has opened the thought
        if not self._thinks and tail.rstrip().endswith("<think>"):
            raise ValueError("the chat template always opens a thought: use --strategy-format think")
        space = before_reply.removeprefix(tail) if before_reply.startswith(tail) else ""
        return (space if space.isspace() else "") + ours  # some have a space before a reply

    def _cut(self, ids: list[int], mark: str) -> tuple[str, list[int], list[int]]:
        """Cut ids where those of a marked message stand: (its leading space or "", ids before, ids after)."""
        for lead in ("", " "):
            part = self._encode_plain(lead + mark)
            for i in range(len(ids) - len(part) + 1):
                if ids[i : i + len(part)] == part:
                    return lead, ids[:i], ids[i + len(part) :]
        raise ValueError("the chat template's own text and a message share a token: such templates are not supported")

    @property
    def _thinks(self) -> bool:
        """Is the model's own thinking the strategy?"""
        return self.form.closing == "</think>"

    def _render(self, messages: list[dict]) -> str:
        """The template's text; thinking is off unless it is the strategy, where a template knows the switch.

        No system message: its text would have no place in templates that know none (Gemma, Mistral).
        """
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=self._thinks
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template takes no user-assistant-user conversation: {error}") from error

    # -- ids -> text -----------------------------------------------------------------------------------

    def decode(self, ids: list[int]) -> str:
        """Text of sampled ids, without control tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def parse(self, text: str) -> tuple[str, str]:
        """Reply text -> (strategy, action)."""
        return parse_reply(text, self.form)

    def _find_stop_ids(self) -> list[int]:
        """Every id that ends a reply: the tokenizer's, the model config's and the generation config's."""
        ids = set()
        for source in (self.tokenizer, self.model.config, getattr(self.model, "generation_config", None)):
            eos = getattr(source, "eos_token_id", None)
            ids.update(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
        if not ids:
            raise ValueError("neither tokenizer nor model names an end-of-turn token: set tokenizer.eos_token")
        return sorted(ids)

    def could_complete(self, texts: tuple[str, ...]) -> torch.Tensor:
        """(vocab,) bool: True where a token's bytes could be the last ones of any of `texts`.

        Delimiters are looked for in the text, wherever token borders fall; this table says when a look is
        worth while, so that decoding steps need no loop over rows (sampler.py).
        """
        if texts in self._tables:
            return self._tables[texts]
        table = torch.zeros(self.vocab, dtype=torch.bool)
        for token, i in self.tokenizer.get_vocab().items():
            if i < self.vocab:
                piece = self.tokenizer.convert_tokens_to_string([token])
                # a piece that is broken UTF-8 may hold part of a character that is not ASCII: then look, to be safe
                partial = "\ufffd" in piece and not all(map(str.isascii, texts))
                table[i] = partial or any(_ends(piece, text) for text in texts)
        self._tables[texts] = table
        return table


def _ends(piece: str, text: str) -> bool:
    """Could `piece`, appended to something, complete `text`?  (The space some decoders strip is ignored.)"""
    return text in piece or any(piece.startswith(text[k:]) or piece.strip() == text[k:].strip() for k in range(1, len(text)))


def control_ids(tokenizer) -> set[int]:
    """Ids that mean something to a model beyond their spelling: special tokens and added ones (<think>, say).

    Not among them: added runs of blanks, which are text (Gemma), and a token for unknown text, unless it has
    another office.
    """
    added = tokenizer.added_tokens_decoder  # id -> AddedToken
    ids = {i for i, token in added.items() if token.special or token.content.strip("\u2581 \n\t\r")}
    offices = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return ids - ({tokenizer.unk_token_id} - offices)


def plain_tokenizer(tokenizer) -> tokenizers.Tokenizer:
    """A copy of the tokenizer for pieces of text from outside: it knows no added tokens, and puts no space
    before a text (SentencePiece's habit), since a piece is never the beginning."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    for part in ("normalizer", "pre_tokenizer"):
        spec[part] = _without_prefix(spec[part])
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _without_prefix(part):
    """A normalizer or pre-tokenizer, as JSON, less whatever puts a space before the text."""
    if isinstance(part, list):
        return [_without_prefix(p) for p in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    off = {"prepend_scheme": "never", "add_prefix_space": False}
    return {key: off[key] if key in off else _without_prefix(value) for key, value in part.items()}


def check_attention(config) -> None:
    """Refuse models whose attention does not fit one mask for all layers (sampler.py, ragged cache)."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    # GPT-Neo; Falcon
    odd = "local" in str(getattr(config, "attention_types", "")) or getattr(config, "multi_query", False)
    if kinds != {"full_attention"} or (window and not hasattr(config, "layer_types")) or odd:
        raise ValueError(
            f"model type {config.model_type!r} uses sliding-window, linear or otherwise special attention, which the "
            "sampler's cache does not support: use one with full attention in every layer (Llama, Qwen2.5, Qwen3, SmolLM, GPT-2)"
        )


@torch.no_grad()
def check_head(model) -> None:
    """Refuse models whose logits are more than the head applied to the last hidden state (scaled, capped, ...).

    Sampling and training both skip such a step, so no comparison of the two could ever notice.
    """
    head, was_training = model.get_output_embeddings(), model.training
    ids = torch.arange(8, device=head.weight.device)[None] % head.weight.shape[0]
    model.eval()
    whole = model(input_ids=ids, use_cache=False).logits.float()
    parts = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    model.train(was_training)
    if whole.shape != parts.shape or (whole - parts).abs().max() > 1e-3 * (1 + whole.abs().max()):
        raise ValueError(
            f"model type {model.config.model_type!r} changes its logits after the head (scaling or soft-capping): use one "
            "that does not (Llama, Qwen2.5, Qwen3, SmolLM, GPT-2)"
        )


# ------------------------------------------------------------------------------------------------------
# log-probs for training
# ------------------------------------------------------------------------------------------------------


def token_logprobs(model, ids: torch.Tensor, mask: torch.Tensor, temps: torch.Tensor, entropy: bool = False):
    """Log-probs of the masked tokens, each given everything before it, at its own temperature (SGE 3.3):

        logp_t = log_softmax(logits_t / T_t)[token_t]

    ids (B, L) long, padded on the right with anything; mask (B, L) bool, True on sampled tokens (never at
    position 0); temps (B, L) float, the temperatures used at sampling.
    Returns (N,) float32 log-probs in row-major order of the mask and, if asked for, (N,) entropies (else None).

    Padding is on the right and attention is causal, so no real token can see padding and positions count
    from 0 in every row: no attention mask is needed.  The head is applied at the N sampled positions only.
    """
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, L, d)
    predict = mask[:, 1:]  # token t is predicted from position t-1
    logits = model.get_output_embeddings()(hidden[:, :-1][predict]).float()  # (N, V), float32 whatever the model
    logits = logits / temps[:, 1:][predict].unsqueeze(-1)
    logps = F.log_softmax(logits, dim=-1)
    chosen = logps.gather(-1, ids[:, 1:][predict].unsqueeze(-1)).squeeze(-1)  # (N,)
    if not entropy:
        return chosen, None
    with torch.no_grad():
        return chosen, -(logps.exp() * logps).sum(-1)


def pad(rows: list[list], value, dtype: torch.dtype, device) -> torch.Tensor:
    """Lists of different lengths -> (B, longest), padded on the right with `value`."""
    out = torch.full((len(rows), max(len(r) for r in rows)), value, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out.to(device)


# ------------------------------------------------------------------------------------------------------
# weights in half precision
# ------------------------------------------------------------------------------------------------------


class MasterAdamW(torch.optim.AdamW):
    """AdamW over float32 copies ("masters") of weights that the model holds in bfloat16.

    bfloat16 has 8 significant bits: a step of 1e-6 on a weight of 0.02 is far below half a unit in its last
    place, and rounds to nothing for ever.  Masters add such steps up; the model gets them rounded.

    Why not float32 weights with autocast: that needs the same memory here (2 + 2 + 4 + 8 bytes a weight for
    model, gradient, master, moments, against 4 + 4 + 8), but sampling would read twice the bytes a token and
    round every weight again at every step.
    """

    def __init__(self, params, **settings):
        self.weights = list(params)
        self.masters = [p.detach().float().clone() for p in self.weights]
        super().__init__(self.masters, **settings)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step(closure)
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> dict:
        return super().state_dict() | {"masters": self.masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        for weight, master, saved in zip(self.weights, self.masters, state["masters"], strict=True):
            master.copy_(saved)
            weight.copy_(master)
        super().load_state_dict({key: value for key, value in state.items() if key != "masters"})


def make_optimizer(model, lr: float) -> torch.optim.AdamW:
    """AdamW that really moves the model's weights, whatever their precision.  State lives where they live."""
    kind = torch.optim.AdamW if model.dtype == torch.float32 else MasterAdamW
    return kind(model.parameters(), lr=lr, weight_decay=0.0)


# ------------------------------------------------------------------------------------------------------
# the tiny base model
# ------------------------------------------------------------------------------------------------------

# A one-token marker for each role, nothing between messages: short prompts make a fast laptop demo.
TINY_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class TinySettings:
    """Everything that shapes the tiny base, besides the code that the cache key covers as well."""

    vocab: int = 640
    width: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    steps: int = 580  # optimiser steps of the warm start
    batch: int = 16  # episodes a step
    lr: float = 4e-3
    temperature: float = 1.2  # of the logits in the warm start's loss; see warm_start
    init: float = 0.08  # spread of the initial weights; copying is learnt far sooner than with the usual 0.02
    seed: int = 0


SLIPS = 0.05  # share of practice steps with a random action instead of the script's


def demo_episode(world: str, rng: random.Random) -> tuple[envs.Task, Reflection, str, list[tuple[str, str, str, bool]]]:
    """One practice episode of the scripted behaviour: (task, reflection, first observation,
    [(strategy, action, next observation, slipped), ...]).  The next observation of the last step is ""."""
    task = envs.practice_task(world, rng)
    mode = rng.choices(("plain", "negative", "positive"), (5, 4, 1))[0]
    strategies: list[str] = []
    feedback = ""
    if mode != "plain":  # make up the earlier episode that this one reflects on
        earlier, _, feedback = _play_script(world, task, rng, wild=rng.random() < 0.5)
        strategies = [strategy for strategy, *_ in earlier]
    steps, first, _ = _play_script(world, task, rng, mode=mode, strategies=strategies)
    return task, Reflection(mode, tuple(strategies), feedback), first, steps


def _play_script(world: str, task: envs.Task, rng: random.Random, **how):
    env, script = envs.make_env(world), envs.make_script(world, task, rng, **how)
    first, _ = env.reset(task)
    observation, steps, over = first, [], False
    while not over:
        strategy, action = script.reply(observation)
        slipped = rng.random() < SLIPS
        if slipped:
            action = envs.slip(world, rng)
        observation, _, terminated, truncated, info = env.step(action)
        over = terminated or truncated
        steps.append((strategy, action, "" if over else observation, slipped))
    return steps, first, info["feedback"]


def demo_tokens(policy: Policy, world: str, rng: random.Random) -> tuple[list[int], list[bool]]:
    """A practice episode as (ids, mask), exactly as a rollout would lay it out; mask on the replies."""
    task, reflection, observation, steps = demo_episode(world, rng)
    ids = policy.prompt_ids(world, task, observation, reflection)
    mask = [False] * len(ids)
    for strategy, action, observation, slipped in steps:
        reply = policy.encode_text(f"{strategy}\n{policy.form.closing}\n{action}") + [policy.tokenizer.eos_token_id]
        ids, mask = ids + reply, mask + [not slipped] * len(reply)  # nobody learns to slip
        if observation:
            glue = policy.turn_ids(observation, reply[-1])
            ids, mask = ids + glue, mask + [False] * len(glue)
    return ids, mask


def warm_start(policy: Policy, world: str, settings: TinySettings) -> float:
    """Next-token loss on the scripted behaviour's replies.  Returns the last loss.

    The loss is taken at `settings.temperature`, that of strategies in SGE: sampled so, the base is as sure of itself
    as its script is, and surer at 1.0 and below - over-confident, as instruction-tuned models are.  With a loss at 1.0
    the hot strategies of a network so small are full of slips (an apple becomes a pear), and a third of the easy
    episodes fail by them; to be punished for slips undoes in the long run what the base can do.
    """
    rng, steps, batch = random.Random(settings.seed), settings.steps, settings.batch
    rows: list = []
    model = policy.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
    # linear warm-up over a tenth, then level, then from half-way on a straight line down to nothing
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / (0.1 * steps), (steps - i) / (0.5 * steps), 1.0)
    )
    loss = torch.tensor(float("nan"))
    bar = tqdm(range(steps), desc=f"warm start ({world})", unit="step", disable=None)
    for _ in bar:
        if not rows:  # ten batches at a time, episodes of like length together: half the padding
            rows = sorted((demo_tokens(policy, world, rng) for _ in range(10 * batch)), key=lambda row: len(row[0]))
            rows = [rows[i : i + batch] for i in range(0, len(rows), batch)]
            rng.shuffle(rows)
        demos = rows.pop()
        ids = pad([r for r, _ in demos], 0, torch.long, policy.device)
        mask = pad([m for _, m in demos], False, torch.bool, policy.device)
        temps = torch.full(ids.shape, settings.temperature, device=ids.device)
        logps, _ = token_logprobs(model, ids, mask, temps)
        loss = -logps.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()
    return loss.item()


def tiny_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`; chat markers are special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    # words keep their leading space; a header line is one piece, so that it can become one token, and so is a
    # cell of the phone's screen ("3,14"): a model of this size copies one token far sooner than five
    words = tokenizers.Regex(r"\n?### [A-Za-z]+\n|###| ?[A-Za-z]+| ?[0-9]+,[0-9]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: no text is out of vocabulary
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    fast.chat_template = TINY_TEMPLATE
    return fast


def _demo_texts(world: str, rng: random.Random, episodes: int = 400) -> list[str]:
    form, texts = FORMATS["header"], []
    for _ in range(episodes):
        task, reflection, observation, steps = demo_episode(world, rng)
        texts += [instruction(reflection, form, brief=True), task.instruction, observation]
        for strategy, action, observation, _ in steps:
            texts += [form.opening, f"{strategy}\n{form.closing}\n{action}", observation]
    return texts


def tiny_settings(world: str) -> TinySettings:
    """The settings of a world's base: the phone's has a token for each of the 240 cells of its screen; code's replies
    are the longest and decide the least: after 580 steps it does not repeat what worked when shown it."""
    return {"phone": TinySettings(vocab=1000), "code": TinySettings(steps=1200)}.get(world, TinySettings())


def tiny_folder(world: str, settings: TinySettings | None = None) -> Path:
    """Where the tiny base of a world is kept.  The name is a hash of all that shapes it: settings, library
    versions, what the scripted behaviour says and does (a sample of it, and its code: a sample misses what is rare), and
    the code that learns from it."""
    settings = settings or tiny_settings(world)
    makers = (Policy.prompt_ids, Policy.turn_ids, demo_tokens, warm_start, token_logprobs, tiny_tokenizer, tiny_config)
    shaped_by = [repr(settings), TINY_TEMPLATE, torch.__version__, transformers.__version__, tokenizers.__version__]
    shaped_by += [envs.script_source(world)]
    shaped_by += _demo_texts(world, random.Random(settings.seed)) + [inspect.getsource(maker) for maker in makers]
    key = hashlib.sha256("\0".join(shaped_by).encode()).hexdigest()[:12]
    return Path(__file__).parent / ".base" / f"tiny-{world}-{key}"


def tiny_config(settings: TinySettings, tokenizer) -> Qwen3Config:
    """An ordinary Qwen3, very small."""
    return Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=settings.width, intermediate_size=3 * settings.width,
        num_hidden_layers=settings.layers, num_attention_heads=settings.heads, num_key_value_heads=settings.kv_heads,
        head_dim=settings.width // settings.heads, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=settings.init, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def build_tiny(world: str, settings: TinySettings | None = None) -> Path:
    """Build and warm-start the tiny base of a world, or find it done.  Returns its Hugging Face folder."""
    settings = settings or tiny_settings(world)
    folder = tiny_folder(world, settings)
    if folder.exists():
        return folder
    started = time.time()
    print(f"building the tiny base of {world!r}, once (then kept in {os.path.relpath(folder)})", flush=True)
    tokenizer = tiny_tokenizer(_demo_texts(world, random.Random(settings.seed)), settings.vocab)
    config = tiny_config(settings, tokenizer)
    with torch.random.fork_rng():  # the run's own random stream does not move
        torch.manual_seed(settings.seed)
        policy = Policy(Qwen3ForCausalLM(config), tokenizer, brief=True)
    loss = warm_start(policy, world, settings)
    partial = folder.with_name(folder.name + f".partial{os.getpid()}")
    policy.model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    made = dict(world=world, settings=repr(settings), last_loss=loss, seconds=time.time() - started)
    (partial / "made.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
    try:
        partial.rename(folder)  # all or nothing: a killed run leaves no half-made base behind
    except OSError:  # another run was faster
        shutil.rmtree(partial)
    return folder


# ------------------------------------------------------------------------------------------------------
# loading
# ------------------------------------------------------------------------------------------------------


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(name: str, world: str, device: str = "cpu", form: str = "header", dtype: str = "float32") -> Policy:
    """Load a policy for a world.

    name: "tiny", a local Hugging Face folder, a run folder of train.py (its checkpoint is taken), a .gguf
    file, or a hub name.  dtype: of the weights, whatever they are stored in.  Raises ValueError in one line
    if there is nothing to load or it cannot be used.
    """
    source = find_model(name, world)
    try:
        model, tokenizer = load_model(source, DTYPES[dtype])
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot load a model from {source!r}: {why}") from error
    # sampling is ours alone: settings that the model's files suggest to generate() play no part
    brief = tokenizer.chat_template == TINY_TEMPLATE
    return Policy(model.to(device).eval(), tokenizer, FORMATS[form], brief)


def is_out_of_memory(error: BaseException) -> bool:
    """torch reports a lack of GPU memory by a class of its own, of main memory by a RuntimeError like many others."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def find_model(name: str, world: str) -> str:
    """What to load for a name: a folder, a .gguf file or a hub name."""
    if name == "tiny":
        return str(build_tiny(world))
    path = Path(name)
    for checkpoint in ("checkpoint", "checkpoint.old"):  # of a run; the old one stands alone after a kill between renames
        if (path / checkpoint / "model").is_dir():
            return str(path / checkpoint / "model")
    # "org/name" that is no local path is a hub name, unless it looks like a slip in a local one
    local = name.startswith((".", os.sep)) or name.count("/") > 1 or name.endswith(".gguf") or os.sep in name.replace("/", "")
    if not path.exists() and (local or ("/" in name and path.parent.is_dir())):
        raise ValueError(f"no model at {name!r}: give 'tiny', a folder, a run folder, a .gguf file or a hub name")
    return name


def load_model(source: str, dtype: torch.dtype) -> tuple:
    """(model, tokenizer) from a folder, a .gguf file or a hub name, all weights in the dtype asked for."""
    extra, folder = {}, source
    if source.endswith(".gguf"):
        lacking = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
        if lacking:
            raise ValueError(f"transformers needs more packages for .gguf files: pip install {' '.join(lacking)}")
        folder, extra = str(Path(source).parent), {"gguf_file": Path(source).name}
    tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
    if extra:  # plain weights: a model that stays quantised can neither be trained nor saved
        extra["quantization_config"] = GgufConfig(dequantize=True)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **extra)
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("its weights are quantised and cannot be trained: use the unquantised model")
    if report["missing_keys"]:  # transformers would go on with random numbers in their place
        missing = sorted(report["missing_keys"])
        raise ValueError(f"{len(missing)} of its weights are not in the file: {', '.join(missing[:3])}")
    for p in model.parameters():  # some classes keep a few in another precision
        p.data = p.data.to(dtype)
    return model, tokenizer


if __name__ == "__main__":
    policy = load_policy("tiny", "house")
    ids, mask = demo_tokens(policy, "house", random.Random(int(sys.argv[1]) if sys.argv[1:] else 0))
    print(policy.tokenizer.decode(ids))
    weights = sum(p.numel() for p in policy.model.parameters())
    print(f"{len(ids)} tokens, {sum(mask)} of them the agent's; {weights / 1e6:.2f}M weights, vocabulary {policy.vocab}")
