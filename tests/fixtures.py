"""Small stand-ins for the tests, all on CPU and with nothing to download (shared/faults.md, "Fixtures").

  make_tokenizer             a byte-level tokenizer of 271 entries, and small chat templates
  gpt2, llama, qwen3         tiny models with random weights, spread far enough that mistakes show
  Scripted, scripted         FIX-SCRIPT, FIX-LOGITS: a model that says what a test dictates, told by its cache
  Table                      logits that are a parameter (positions, vocab): for losses and their gradients
  ScriptedWorld, task, play  a world whose answers are written in the task

Run the tests with one thread:  OMP_NUM_THREADS=1 python -m pytest tests
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)

import envs  # noqa: E402
from policy import Policy  # noqa: E402
from reflection import FORMATS, ReplyFormat  # noqa: E402, F401
from sampler import Job, Sampling, rollout  # noqa: E402

# -- tokenizers and templates --------------------------------------------------------------------------

SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|im_start|>", "<|im_end|>"]
# "ab", so that a+b is no bijection (FIX-TOK); the others let one delimiter be spread over several tokens
MERGES = [("a", "b"), ("<", "/"), ("a", "c"), ("ac", "t"), (">", "x"), ("#", "#"), ("##", "#")]

MARKERS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
MARKERS += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
WITH_BOS = "<|bos|>" + MARKERS
# takes the thoughts out of every reply but the last, as templates of reasoning models do
STRIPS_THOUGHTS = MARKERS.replace("m.content", "m.content if loop.last else m.content.split('</think>')[-1]")
# templates under which a conversation does not simply grow
MOVES_SYSTEM = MARKERS.replace("%}<|{{", "%}{% if loop.last %}<|system|>now<|end|>{% endif %}<|{{", 1)
DROPS_REPLIES = MARKERS.replace("%}<|{{", "if m.role == 'user' %}<|{{", 1)


def make_tokenizer(template: str | None = MARKERS, eos: str | None = "<|end|>", adds_bos: bool = False, **kwargs):
    """A byte-level BPE tokenizer: special tokens, the 256 bytes, MERGES."""
    pieces = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in MERGES]
    inner = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    kwargs = dict(pad_token="<|pad|>", eos_token=eos, chat_template=template) | kwargs
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
        kwargs["bos_token"] = "<|bos|>"
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **kwargs)


VOCAB = len(make_tokenizer())

# -- models --------------------------------------------------------------------------------------------


def build(kind: str, **config):
    """A model of Hugging Face's class `kind`+Config, always with the same random weights."""
    common = dict(vocab_size=VOCAB, hidden_size=32, initializer_range=0.3, bos_token_id=None, eos_token_id=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind + "Config")(**common | config))


SIZE = dict(num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=256)
ROTARY = dict(SIZE, intermediate_size=64, num_key_value_heads=1, head_dim=16)  # one key/value head for two heads
MODELS = {
    "gpt2": ("GPT2", SIZE),  # absolute positions and, when training, dropout of 0.1
    "llama-tied": ("Llama", dict(ROTARY, tie_word_embeddings=True)),
    "llama-untied": ("Llama", dict(ROTARY, tie_word_embeddings=False)),
    "qwen3": ("Qwen3", dict(ROTARY, vocab_size=VOCAB + 30)),  # the head has more rows than the tokenizer entries
}


def random_policy(name: str = "gpt2", stop_every: int = 9, **config) -> Policy:
    """A policy with random weights.  Every ninth byte ends a reply, so that replies differ in length."""
    kind, settings = MODELS[name]
    model = build(kind, **settings | config)
    model.generation_config.eos_token_id = list(range(len(SPECIAL), VOCAB, stop_every))
    return Policy(model, make_tokenizer(), SHORT, brief=True)


class Fake(torch.nn.Module):
    """What `Policy` and the sampler ask of a Hugging Face model; the head is the identity: hidden = logits."""

    dtype, generation_config = torch.float32, None
    base_model = property(lambda self: self)

    def __init__(self, vocab: int, context: int):
        super().__init__()
        self.head = torch.nn.Linear(vocab, vocab, bias=False)
        self.head.weight = torch.nn.Parameter(torch.eye(vocab), requires_grad=False)
        one = dict(num_hidden_layers=1, num_attention_heads=1, hidden_size=1)
        self.config = SimpleNamespace(model_type="fake", max_position_embeddings=context, _attn_implementation="sdpa", **one)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, position_ids=None, cache=None, use_cache=None, ragged=None):
        hidden = self.hidden(input_ids, cache)
        return SimpleNamespace(last_hidden_state=hidden, logits=self.head(hidden))


class Scripted(Fake):
    """FIX-SCRIPT and FIX-LOGITS.  rule: (all ids of the row so far) -> logits (vocab,) of the next token.

    With a cache, "so far" is what the token's own cache row holds up to its own slot: the ids are kept
    there as keys.  A mix-up of rows or slots therefore changes what is said.
    """

    def __init__(self, rule=lambda seen: torch.zeros(VOCAB), vocab: int = VOCAB, context: int = 4096):
        super().__init__(vocab, context)
        self.rule = rule

    def hidden(self, ids, cache):
        if cache is None:
            seen = [row[: j + 1] for row in ids.tolist() for j in range(len(row))]
        else:
            keys, _ = cache.update(*[ids.float()[:, None, :, None]] * 2, 0)  # (1, 1 head, T, 1 dimension)
            places = zip(cache.at.row.tolist(), cache.at.slot.tolist(), strict=True)
            seen = [keys[row, 0, : slot + 1, 0].long().tolist() for row, slot in places]
        return torch.stack([self.rule(s) for s in seen]).view(*ids.shape, -1)


class Table(Fake):
    """Logits that depend on the position alone and are a parameter: table (positions, vocab)."""

    def __init__(self, table: torch.Tensor):
        super().__init__(table.shape[1], table.shape[0])
        self.table = torch.nn.Parameter(table.clone())

    def hidden(self, ids, cache):
        return self.table[: ids.shape[1]].expand(len(ids), -1, -1)


# "<" opens a strategy, "></" closes it (two tokens, or a part of one), "##" ends a reply
SHORT = ReplyFormat("<", "></", "first", "then", ("##",))


def scripted(replies: dict, tokenizer=None, form=SHORT, context: int = 4096, eos=None, generation_eos=None) -> Policy:
    """A policy that replies as dictated.  replies: marker -> the replies of its turns, each a text or ids.

    The marker is the one character that tells a row's prompt from the others'.  A text is encoded by the
    tokenizer, with the end-of-turn token after it; ids are said as they are, and after them "." for ever.
    eos, generation_eos: end-of-turn ids of the model's two configs.
    """
    model = Scripted(context=context)
    model.config.eos_token_id, model.generation_config = eos, SimpleNamespace(eos_token_id=generation_eos)
    policy = Policy(model, tokenizer or make_tokenizer(), form, brief=True)
    (dot,), tail, end = policy.encode_text("."), policy._tail, [policy.tokenizer.eos_token_id]
    scripts = {
        policy.encode_text(marker)[0]: [policy.encode_text(r) + end if isinstance(r, str) else r for r in turns]
        for marker, turns in replies.items()
    }

    def rule(seen: list[int]) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        starts = [i + len(tail) for i in range(len(seen)) if seen[i : i + len(tail)] == tail]  # of replies
        turns = next((scripts[i] for i in seen if i in scripts), [])
        if 0 < len(starts) <= len(turns):
            rest = turns[len(starts) - 1][len(seen) - starts[-1] :]
            logits[rest[0] if rest else dot] = 50.0
        return logits

    model.rule = rule
    return policy


# -- a world -------------------------------------------------------------------------------------------


class ScriptedWorld:
    """Says task.spec["says"] in order, "*" standing for the action, and ends when they are used up."""

    steps: list[tuple[str, str]] = []  # (task id, action) of every step of all worlds, in order

    def reset(self, task):
        self.task, self.says = task, list(task.spec["says"])
        return self.says.pop(0), {"outcome": None, "feedback": ""}

    def step(self, action):
        assert self.says is not None, "step() after the episode's end"
        if self.task.spec.get("breaks"):
            raise RuntimeError("the world broke")
        self.steps.append((self.task.id, action))
        info = {"outcome": action, "feedback": "over"}
        if self.says:
            return self.says.pop(0).replace("*", action), 0.0, False, False, info
        self.says, reward = None, self.task.spec["reward"]
        return "", reward, reward > 0, reward == 0, info


def task(text: str, says: list[str], reward: float = 1.0, **spec) -> envs.Task:
    """A task of the scripted world; its first observation is says[0], it has len(says) steps."""
    return envs.Task(f"scripted/{text}", "train", "easy", "say", text, dict(says=says, reward=reward, **spec))


def use_scripted_world(monkeypatch) -> None:
    """Let every call of envs.make_env give a ScriptedWorld."""
    monkeypatch.setattr(envs, "make_env", lambda world: ScriptedWorld())
    monkeypatch.setitem(envs.INSTRUCTIONS, "scripted", {"brief": "", "full": "You are in a world."})
    monkeypatch.setattr(ScriptedWorld, "steps", [])


def play(policy: Policy, jobs, seed: int = 0, **how) -> list:
    """Roll out jobs (or tasks) in the scripted world."""
    jobs = [job if isinstance(job, Job) else Job(job) for job in jobs]
    return rollout(policy, "scripted", jobs, Sampling(**how), torch.Generator().manual_seed(seed))


def reply_spans(episode) -> list[tuple[int, int]]:
    """[start, stop) of every reply: the runs of mask 1."""
    edges = [i for i in range(1, len(episode.mask)) if episode.mask[i] != episode.mask[i - 1]]
    edges += [len(episode.mask)] * (len(edges) % 2)
    return list(zip(edges[::2], edges[1::2], strict=True))
