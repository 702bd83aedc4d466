"""The policy: a causal language model with its tokenizer, and the way between text and token ids.

In the paper's terms this file is pi (SGE 3.2): one network that writes a strategy s_t and then an action
a_t given the observation o_t.  It holds

  Policy            model + tokenizer; prompt -> ids, observation -> ids, reply text -> (strategy, action)
  token_logprobs    log-probs of sampled tokens, each at the temperature it was drawn with (SGE 3.3)
  build_tiny        the embedded default model, built from nothing and warm-started on a scripted behaviour
  load_policy       any local or hub model, or the tiny one

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
import inspect
import json
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template: use an instruct/chat model, or set tokenizer.chat_template")
        check_attention(model.config)
        check_head(model)
        self.model, self.tokenizer, self.form, self.brief = model, tokenizer, form, brief
        self.vocab = model.get_output_embeddings().weight.shape[0]  # may be larger than the tokenizer's
        self.context = getattr(model.config, "max_position_embeddings", None) or 1 << 30
        self.stop_ids = self._find_stop_ids()
        self._encoded: dict[str, list[int]] = {}
        self._tables: dict[tuple, torch.Tensor] = {}
        self._head, self._between, self._tail = self._template_pieces()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    # -- text -> ids -----------------------------------------------------------------------------------

    def encode_text(self, text: str) -> list[int]:
        """Ids of text that came from outside: no spelling in it becomes a control token."""
        if text not in self._encoded:  # small worlds say the same things over and over
            if len(self._encoded) > 100_000:
                self._encoded.clear()
            backend = self.tokenizer.backend_tokenizer  # its parts one by one: only these know no added tokens
            normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
            words = backend.pre_tokenizer.pre_tokenize_str(normal) if backend.pre_tokenizer else [(normal, None)]
            self._encoded[text] = [token.id for word, _ in words for token in backend.model.tokenize(word)]
        return list(self._encoded[text])

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

    def _template_pieces(self) -> tuple[list[int], list[int], list[int]]:
        """Find the template's own text around messages by rendering marked ones and cutting at the marks.

        Returns the ids (a) before the first user message, (b) from the end of a reply to the start of the
        next user message, (c) from the end of a user message to the start of the strategy.
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
        head, tail = start.split(first)
        between = whole.split(reply)[1].split(second)[0]
        if not whole.startswith(head) or not whole.endswith(tail):
            raise ValueError("the chat template rewrites earlier turns: such templates are not supported yet")
        head_ids, bos = self._encode_template(head), self.tokenizer.bos_token_id
        # exactly one begin-of-sequence token: the template's, or else the one the tokenizer would add
        if bos is not None and bos in self.tokenizer.encode("") and head_ids[:1] != [bos]:
            head_ids = [bos] + head_ids
        return head_ids, self._encode_template(between), self._encode_template(tail + self.form.opening)

    def _render(self, messages: list[dict]) -> str:
        """The template's text; thinking is off where a template knows the switch."""
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

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


def warm_start(policy: Policy, world: str, steps: int, batch: int, lr: float, seed: int) -> float:
    """Next-token loss on the scripted behaviour's replies (supervised, so at T = 1).  Returns the last loss."""
    rng = random.Random(seed)
    rows: list = []
    model = policy.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
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
        logps, _ = token_logprobs(model, ids, mask, torch.ones_like(ids, dtype=torch.float32))
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
    # words keep their leading space; a header line is one piece, so that it can become one token
    words = tokenizers.Regex(r"\n?### [A-Za-z]+\n|###| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s+")
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


def tiny_folder(world: str, settings: TinySettings = TinySettings()) -> Path:
    """Where the tiny base of a world is kept.  The name is a hash of all that shapes it: settings, library
    versions, what the scripted behaviour says and does (a sample of it), and the code that learns from it."""
    makers = (Policy.prompt_ids, Policy.turn_ids, demo_tokens, warm_start, token_logprobs, tiny_tokenizer, tiny_config)
    shaped_by = [repr(settings), TINY_TEMPLATE, torch.__version__, transformers.__version__, tokenizers.__version__]
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


def build_tiny(world: str, settings: TinySettings = TinySettings()) -> Path:
    """Build and warm-start the tiny base of a world, or find it done.  Returns its Hugging Face folder."""
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
    loss = warm_start(policy, world, settings.steps, settings.batch, settings.lr, settings.seed)
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


def load_policy(name: str, world: str, device: str = "cpu", form: str = "header") -> Policy:
    """Load a policy for a world.

    name: "tiny", a local Hugging Face folder, a run folder of train.py (its checkpoint is taken), or a hub
    name.  Weights are loaded as float32.  Raises ValueError in one line if there is nothing to load.
    """
    folder = str(build_tiny(world)) if name == "tiny" else name
    if (Path(folder) / "checkpoint" / "model").is_dir():
        folder = str(Path(folder) / "checkpoint" / "model")
    if (os.sep in folder or folder.startswith(".")) and not Path(folder).is_dir():
        raise ValueError(f"no model at {folder!r}: give 'tiny', a folder, a run folder or a hub name")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load a model from {folder!r}: {str(error).splitlines()[0]}") from error
    # sampling is ours alone: settings that the model's files suggest to generate() play no part
    brief = tokenizer.chat_template == TINY_TEMPLATE
    return Policy(model.to(device).eval(), tokenizer, FORMATS[form], brief)


if __name__ == "__main__":
    policy = load_policy("tiny", "house")
    ids, mask = demo_tokens(policy, "house", random.Random(int(sys.argv[1]) if sys.argv[1:] else 0))
    print(policy.tokenizer.decode(ids))
    weights = sum(p.numel() for p in policy.model.parameters())
    print(f"{len(ids)} tokens, {sum(mask)} of them the agent's; {weights / 1e6:.2f}M weights, vocabulary {policy.vocab}")
