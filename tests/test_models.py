"""Real models: templates and tokenizers of the known families, model files, precision, memory, portability.

The templates are written for these tests in the manner of the families named; the tokenizers have a few
merges that cross the border between template and message, where such borders exist.

Entries of kinds C, G and L that are tested elsewhere: C20 to C29 in test_policy.py, G59 to G63 and G66 to G68 in
test_train.py, test_sampler.py and test_grpo.py.  That cannot apply: G65, since there is no schedule; L109, since
nothing here limits a process.
"""

import ast
import copy
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

import envs
import policy as policy_module
import train
from conftest import smallest_run
from fixtures import FORMATS, MARKERS, Policy, Scripted, SimpleNamespace, build, make_tokenizer, reply_spans
from policy import MasterAdamW, load_policy, make_optimizer
from sampler import Job, Sampling, rollout
from test_train import checkpoint_of, equal, same_run

ROOT = Path(__file__).parent.parent

# -- families --------------------------------------------------------------------------------------------

GENERATE = "{% if add_generation_prompt %}"
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
TEMPLATES = {
    "qwen3": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
        + GENERATE + "<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
    ),
    "smollm2": (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + GENERATE + "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
        + GENERATE + "{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
    ),
    "gemma": (
        REFUSES_SYSTEM + "{{ bos_token }}{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}</turn>\n{% endfor %}" + GENERATE + "{{ '<turn>model\n' }}{% endif %}"
    ),
    "mistral": (
        REFUSES_SYSTEM + "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + eos_token }}{% endfor %}"
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        + GENERATE + "{{ '<|assistant|>\n' }}{% endif %}"
    ),
}  # fmt: skip
SPECIAL = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "smollm2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin|>", "<|eot|>", "<|head|>", "<|/head|>"], "gemma": ["<bos>", "<eos>", "<turn>", "</turn>"],
    "mistral": ["<s>", "</s>"], "phi": ["<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
}  # fmt: skip
ADDED = ["<think>", "</think>"]  # not special, and yet no text
ASCII = [chr(c) for c in range(33, 127)]


def byte_level(special: list, **kwargs):
    """GPT-2's kind: 256 bytes, words with their space before them."""
    merges = [("F", "i"), ("Ġ", "F"), ("Ċ", "Ċ"), ("#", "#"), ("##", "#")]
    pieces = special + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    inner = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return finish(inner, special, **kwargs)


def sentencepiece(kind: str, special: list, **kwargs):
    """SentencePiece's kinds: a space is "\u2581"; before a text there is one more of it (or not: gemma)."""
    merges = [("\u2581", "F"), ("\u2581", "S"), ("\u2581", "["), ("\u2581", "l"), ("#", "#"), ("##", "#")]
    plain = ["\u2581", *ASCII] + [a + b for a, b in merges]
    pieces = ["<unk>", *special, *(f"<0x{b:02X}>" for b in range(256)), *plain]
    if kind == "unigram":  # control tokens stand in the vocabulary, and cost nothing
        scores = [(p, 0.0 if p in special else -20.0 if p.startswith("<0x") else -3.0 - (len(p) == 1)) for p in pieces]
        inner = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        inner = tokenizers.Tokenizer(
            models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
    space = normalizers.Replace(" ", "\u2581")
    if kind == "legacy":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    elif kind == "gemma":
        inner.normalizer, inner.pre_tokenizer = space, pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "first" else "always")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return finish(inner, special, unk_token="<unk>", **kwargs)


def finish(inner, special: list, rstrip: bool = False, adds_bos: bool = False, **kwargs):
    inner.add_special_tokens([AddedToken(s, special=True, normalized=False, rstrip=rstrip and "|" in s) for s in special])
    inner.add_tokens([AddedToken(s, special=False, normalized=False) for s in ADDED])
    if adds_bos:
        bos = special[0]
        inner.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))])
        kwargs["bos_token"] = bos
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **kwargs)


def make(name: str):
    """A tokenizer with its template.  name: the template's family, and a tokenizer's kind where it has several."""
    family, _, kind = name.partition("-")
    special, how = SPECIAL[family], dict(chat_template=TEMPLATES[family])
    if family in ("qwen3", "smollm2"):
        return byte_level(special, eos_token="<|im_end|>", **how)
    if family == "llama3":
        return byte_level(special, eos_token="<|eot|>", adds_bos=True, **how)
    if family == "gemma":
        return sentencepiece("gemma", special, eos_token="<eos>", adds_bos=True, **how)
    if family == "phi":  # its control tokens swallow the newline after them; its end of turn is not its eos
        return sentencepiece("legacy", special, eos_token="<|endoftext|>", rstrip=True, **how)
    return sentencepiece(kind, special, eos_token="</s>", adds_bos=True, **how)


FAMILIES = ("qwen3", "smollm2", "llama3", "gemma", "phi", "mistral-legacy", "mistral-first", "mistral-always", "mistral-unigram")


def policy_of(tokenizer, form: str = "header") -> Policy:
    n = len(tokenizer)
    return Policy(Scripted(lambda seen: torch.zeros(n), vocab=n), tokenizer, FORMATS[form])


TASK = envs.Task("1", "train", "easy", "find", "Find the cat.", {})
SAID = "look (at) the bed\n### Action\ngo bed"


# -- C: templates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_put_together_are_one_rendering_of_the_conversation(name):
    """C21, C22, C24: glue that was encoded alone differs from the glue in its place, by a space or a newline."""
    tokenizer = make(name)
    policy = policy_of(tokenizer)
    prompt, turn = policy.prompt_ids("house", TASK, "At the door."), policy.turn_ids("See: the (bed).", last_id=-1)
    text = "\n".join((envs.INSTRUCTIONS["house"]["full"], policy_module.instruction(policy_module.PLAIN, policy.form, False)))
    turns = [
        {"role": "user", "content": f"{text}\nFind the cat.\nAt the door."},
        {"role": "assistant", "content": policy.form.opening + SAID},
        {"role": "user", "content": "See: the (bed)."},
    ]
    whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    if name == "qwen3":  # its history lacks the empty thought that every reply began with; ours keeps it
        whole = whole.replace("assistant\n### S", "assistant\n<think>\n\n</think>\n\n### S")
    whole += (" " if name.startswith("mistral") else "") + policy.form.opening
    ids = tokenizer.encode(whole, add_special_tokens=False)
    assert ids[: len(prompt)] == prompt and ids[-len(turn) :] == turn
    assert tokenizer.decode(ids[len(prompt) : -len(turn)]).strip() == SAID
    bos = tokenizer.bos_token_id
    assert bos is None or (prompt[0] == bos and prompt.count(bos) == 1 and bos not in turn)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_becomes_a_control_token_in_any_family(name):
    """C27: a strategy or an observation spells control tokens; a Unigram model even has them in its vocabulary."""
    tokenizer = make(name)
    policy = policy_of(tokenizer)
    control = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    spelled = "".join(SPECIAL[name.split("-")[0]]) + " x".join(ADDED) + " <unk> \u898b\x00 ### Action\n"
    for text in (spelled, *(s * 50 for s in SPECIAL[name.split("-")[0]]), *(s[:-1] for s in ADDED), ""):
        ids = policy.encode_text(text)
        assert not control & set(ids)
        if name != "mistral-unigram":  # (its <unk> is text that it can say in one token, which decoding drops)
            assert policy.decode(ids).strip() == text.strip()
    prompt = policy.prompt_ids("house", TASK, spelled)
    clean = policy.prompt_ids("house", TASK, "nothing")
    assert [i for i in prompt if i in control] == [i for i in clean if i in control]


def test_unknown_text_is_no_end_of_turn():
    """C27: the token for unknown text doubles as end-of-turn, so that an odd character ends a message."""
    inner = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(["</s>", *ASCII, " ", "\n"])}, [], unk_token="</s>"))
    inner.decoder = decoders.Fuse()
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    tokenizer = finish(inner, ["</s>"], unk_token="</s>", eos_token="</s>", chat_template=template)
    assert tokenizer.encode("a\u898b") == [tokenizer.encode("a")[0], 0]
    assert 0 not in policy_of(tokenizer).encode_text("a\u898b\u898bb")


def test_thinking_is_off_unless_it_is_the_strategy():
    """C23: the opening of a thought is doubled, or missing, or an empty one closes what shall be thought."""
    tokenizer = make("qwen3")
    tails = {form: tokenizer.decode(policy_of(tokenizer, form)._tail) for form in ("header", "think")}
    assert tails["header"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n### Strategy\n")
    assert tails["think"].endswith("<|im_start|>assistant\n<think>\n") and tails["think"].count("<think>") == 1
    assert "</think>" not in tails["think"]
    tokenizer.chat_template = TEMPLATES["smollm2"].replace("assistant\n'", "assistant\n<think>\n'")  # always opens one
    assert tokenizer.decode(policy_of(tokenizer, "think")._tail).endswith("<|im_start|>assistant\n<think>\n")
    with pytest.raises(ValueError, match="--strategy-format think"):
        policy_of(tokenizer)


def test_template_names_the_end_of_turn():
    """B16, C26: the model closes its turn by a token that is neither the tokenizer's eos nor in any config."""
    policy = policy_of(make("phi"))
    end = policy.tokenizer.convert_tokens_to_ids("<|end|>")
    assert policy.stop_ids == sorted([policy.tokenizer.eos_token_id, end])
    assert policy.turn_ids("go", last_id=end) == policy.turn_ids("go", last_id=-1)[1:]


def test_tokenizers_that_cannot_be_used_are_refused_in_one_line():
    """C22, C23: no template, not a fast tokenizer, a template that takes no conversation, a closing that decoding drops."""
    tokenizer = make("mistral-first")
    for template in ("{{ raise_exception('no') }}", "{{ messages[0].content }", None):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="template") as refusal:
            policy_of(tokenizer)
        assert len(str(refusal.value).splitlines()) == 1
    tokenizer.chat_template = "{% for m in messages %}\"{{ m.content }}</s>{% endfor %}"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    policy_of(tokenizer)  # a template may put anything before a message ...
    merged = make_tokenizer("{% for m in messages %}a{{ 'b' }}{{ m.content }}<|end|>{% endfor %}", pad_token=None)
    assert policy_of(merged).tokenizer.pad_token is None  # ... and nobody needs a pad token
    drops = make("qwen3")
    drops.add_special_tokens({"additional_special_tokens": ADDED})
    with pytest.raises(ValueError, match="control token of this tokenizer"):
        policy_of(drops, "think")
    slow = SimpleNamespace(chat_template=MARKERS)
    with pytest.raises(ValueError, match="fast"):
        Policy(Scripted(), slow)


def test_template_that_shares_a_token_with_a_message_is_refused():
    """C21: there is no border between glue and message to cut at."""
    pieces = ["</s>", *ASCII, " ", "\n", "xF"]
    inner = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("x", "F")]))
    inner.decoder = decoders.Fuse()
    template = "{% for m in messages %}x{{ m.content }}</s>{% endfor %}"
    with pytest.raises(ValueError, match="share a token"):
        policy_of(finish(inner, ["</s>"], eos_token="</s>", chat_template=template))


# -- G: precision ----------------------------------------------------------------------------------------


def small_llama(**config):
    size = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64)
    return build("Llama", **size | dict(max_position_embeddings=256) | config)


def random_steps(model, optimizer, n: int, seed: int = 0):
    """n optimiser steps with gradients that have a direction, the same in every precision."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        for p in model.parameters():
            p.grad = (torch.randn(p.shape, generator=generator) + 2).to(torch.bfloat16).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_bfloat16_weights_move_at_a_tiny_learning_rate_as_float32_ones_do():
    """G64: a step of 1e-6 is below half a unit in bfloat16's last place, and is lost."""
    start = {k: v.bfloat16() for k, v in small_llama(initializer_range=0.02).state_dict().items()}
    results = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("naive", torch.bfloat16)):
        model = small_llama()
        model.load_state_dict(start)
        model.to(dtype)
        naive = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
        random_steps(model, naive if name == "naive" else make_optimizer(model, 1e-6), 300)
        results[name] = torch.cat([p.detach().flatten().float() for p in model.parameters()])
    names = [n for n, _ in small_llama().named_parameters()]
    before = torch.cat([start[name].flatten().float() for name in names])
    small = before.abs() < 0.1  # (norms stand at 1, where even 300 steps are below half a unit)
    full, half = results["float32"] - before, results["bfloat16"] - before
    assert 2e-4 < full.abs().mean() < 4e-4
    assert torch.equal(results["bfloat16"], results["float32"].bfloat16().float())  # the same weights, rounded
    assert half[small].mean() == pytest.approx(full[small].mean().item(), rel=0.05)
    assert (results["naive"] - before).abs().mean() < 0.2 * full.abs().mean()  # what the masters are for


def test_masters_are_part_of_the_optimizers_state():
    """G59, G64: resumed from rounded weights, the run is another one; tied weights have one master."""
    model = small_llama(tie_word_embeddings=True).bfloat16()
    optimizer = make_optimizer(model, 1e-6)
    assert isinstance(optimizer, MasterAdamW) and len(optimizer.masters) == len(list(model.parameters()))
    random_steps(model, optimizer, 5)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    random_steps(model, optimizer, 5, seed=1)
    again = small_llama(tie_word_embeddings=True).bfloat16()
    again.load_state_dict(weights)
    resumed = make_optimizer(again, 1e-6)
    resumed.load_state_dict(state)
    random_steps(again, resumed, 5, seed=1)
    assert equal(resumed.state_dict(), optimizer.state_dict()) and equal(again.state_dict(), model.state_dict())
    assert {t.dtype for t in resumed.masters} == {torch.float32}
    assert all(s["exp_avg"].device == p.device for p, s in resumed.state.items())
    resumed.zero_grad()
    assert all(p.grad is None for p in again.parameters())


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_weights_come_in_the_precision_asked_for(tmp_path, stored, asked):
    """G64: from_pretrained keeps the file's precision unless told otherwise."""
    small_llama().to(policy_module.DTYPES[stored]).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), "house", dtype=asked)
    assert {p.dtype for p in policy.model.parameters()} == {policy_module.DTYPES[asked]}
    assert policy.model.model.rotary_emb.inv_freq.dtype == torch.float32  # angles of positions stay exact


def test_a_run_in_bfloat16_resumes_to_the_last_bit(micro_base, coins, tmp_path):
    """G59, G64: masters are not in the checkpoint; or the weights come back in another precision."""
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert train.main(smallest_run(micro_base, whole, dtype="bfloat16", lr=1e-5)) == 0
    assert train.main(smallest_run(micro_base, half, dtype="bfloat16", lr=1e-5, updates=2)) == 0
    assert train.main(["--resume", str(half), "--updates", "4"]) == 0
    assert same_run(whole, half)
    weights, state, _ = checkpoint_of(whole)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16} and state["optimizer"]["masters"]
    assert {m.dtype for m in state["optimizer"]["masters"]} == {torch.float32}


# -- G: model files --------------------------------------------------------------------------------------


def test_a_run_folder_is_a_plain_hugging_face_model(micro_base, coins, tmp_path, monkeypatch):
    """G66: other tools find tied weights, template and end-of-turn, and generate() says what we sample greedily."""
    assert train.main(smallest_run(micro_base, tmp_path / "run", updates=1)) == 0
    monkeypatch.undo()  # from here on the real house
    folder = tmp_path / "run" / "checkpoint" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    policy = load_policy(str(tmp_path / "run"), "house")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    jobs = [Job(t) for t in envs.tasks("house", "train", "easy")[:3]]
    greedy = Sampling(0.0, 0.0, strategy_tokens=14, reply_tokens=20)
    replies = 0
    for e in rollout(policy, "house", jobs, greedy, torch.Generator().manual_seed(0)):
        for start, stop in reply_spans(e)[:3]:
            ids = torch.tensor([e.ids[:start]])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=stop - start)
            assert out[0, start:].tolist() == e.ids[start:stop]
            replies += 1
    assert replies >= 3


def test_a_file_that_lacks_weights_is_refused(tmp_path):
    """G66: the head is missing in the file, and comes up random."""
    small_llama(tie_word_embeddings=False).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    load_policy(str(tmp_path), "house")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 of its weights are not in the file: lm_head.weight"):
        load_policy(str(tmp_path), "house")
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="cannot load a model") as refusal:
        load_policy(str(tmp_path), "house")
    assert len(str(refusal.value).splitlines()) == 1


def test_names_are_paths_or_hub_names(tmp_path, monkeypatch):
    """A hub name with its owner is no missing folder; a slip in a path is no hub name; a lone old checkpoint is found."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    assert policy_module.find_model("owner/name", "house") == "owner/name"
    for slip in ("./none", "runs/none", "/none", "some/where/else", "none.gguf"):
        with pytest.raises(ValueError, match="no model at"):
            policy_module.find_model(slip, "house")
    Path("runs/a/checkpoint.old/model").mkdir(parents=True)
    assert Path(policy_module.find_model("runs/a", "house")) == Path("runs/a/checkpoint.old/model")


def test_gguf_without_its_packages_says_what_to_install(tmp_path, monkeypatch):
    """G69: a clear message where a package is missing."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(policy_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gguf accelerate$"):
        load_policy(str(tmp_path / "m.gguf"), "house")


def write_gguf(path, model, tokenizer) -> None:
    """A Llama as llama.cpp lays it out: rows of q and k in another order, float32."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    c, w = model.config, gguf.GGUFWriter(path, "llama")
    w.add_context_length(c.max_position_embeddings), w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers), w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads), w.add_head_count_kv(c.num_key_value_heads), w.add_vocab_size(c.vocab_size)
    w.add_layer_norm_rms_eps(c.rms_norm_eps), w.add_rope_dimension_count(c.head_dim), w.add_file_type(0)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    w.add_tokenizer_model("gpt2"), w.add_token_list(pieces)
    added = tokenizer.added_tokens_decoder  # types: 3 control, 4 added, 1 any other
    w.add_token_types([(3 if added[i].special else 4) if i in added else 1 for i in range(len(pieces))])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]])
    w.add_eos_token_id(tokenizer.eos_token_id), w.add_chat_template(tokenizer.chat_template)
    parts = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, weight in model.state_dict().items():
        name = name.removesuffix(".weight")
        if name in outer:
            target = outer[name]
        else:
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            target = f"blk.{layer}.{parts[part]}"
            heads = {"self_attn.q_proj": c.num_attention_heads, "self_attn.k_proj": c.num_key_value_heads}.get(part)
            if heads:  # halves of a head's rows interleave
                weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        w.add_tensor(target + ".weight", weight.contiguous().numpy())
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()


def test_gguf_is_the_model_it_was_made_from_and_a_run_of_it_can_be_saved(coins, tmp_path):
    """G69: other weights or ids than the source's; transformers refuses to save what it read from GGUF."""
    tokenizer = byte_level(SPECIAL["smollm2"], eos_token="<|im_end|>", chat_template=TEMPLATES["smollm2"])
    source = small_llama(vocab_size=len(tokenizer), tie_word_embeddings=False, max_position_embeddings=2048).eval()
    write_gguf(tmp_path / "m.gguf", source, tokenizer)
    policy = load_policy(str(tmp_path / "m.gguf"), "house")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (policy.model(input_ids=ids).logits - source(input_ids=ids).logits).abs().max() < 1e-3
    words = ["", " ", "a", " a", "a ", "  ", "\n", "\n\n", "a\n b", "Fi F", "###", "12 345", "caf\u00e9", "\u898b", "\U0001f431",
             "<|im_end|>", "a<|im_start|>b", "it's", "\t.", "x\x00y"]  # fmt: skip
    assert [policy.tokenizer.encode(t) for t in words] == [tokenizer.encode(t) for t in words]
    half = load_policy(str(tmp_path / "m.gguf"), "house", dtype="bfloat16")
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    out = tmp_path / "run"
    assert train.main(smallest_run(tmp_path / "m.gguf", out, updates=1, lr=1e-4)) == 0
    assert train.main(["--resume", str(out), "--updates", "2"]) == 0
    plain = AutoModelForCausalLM.from_pretrained(out / "checkpoint" / "model")
    assert not hasattr(plain.config, "quantization_config") and {p.dtype for p in plain.parameters()} == {torch.float32}


def test_junk_that_is_called_gguf_is_refused_in_one_line(tmp_path):
    """G69: a torn or foreign file."""
    pytest.importorskip("gguf"), pytest.importorskip("accelerate")
    (tmp_path / "m.gguf").write_bytes(b"hello" * 100)
    with pytest.raises(ValueError, match="cannot load a model") as refusal:
        load_policy(str(tmp_path / "m.gguf"), "house")
    assert len(str(refusal.value).splitlines()) == 1


# -- memory ----------------------------------------------------------------------------------------------


def needed(policy, **settings) -> dict[str, float]:
    config = train.Config(**dict(model="x", micro_tokens=512) | settings).resolve()
    return {name.split(" of ")[0]: amount for name, amount in train.memory_needed(config, policy).items()}


def test_memory_estimate_follows_the_flags():
    """The line tells what each flag costs: rows, micro-tokens, precision."""
    policy = Policy(small_llama(), make_tokenizer())
    weights = sum(p.numel() for p in policy.model.parameters())
    base = needed(policy)
    assert (base["weights"], base["gradients"], base["Adam"]) == (4 * weights, 4 * weights, 8 * weights)
    assert needed(policy, rows=8)["keys and values"] * 30 == needed(policy, rows=240)["keys and values"]
    assert needed(policy, micro_tokens=1024)["activations"] == 2 * base["activations"]
    policy.model.activation_checkpointing_enable()
    assert needed(policy)["activations"] < base["activations"]
    policy.model.activation_checkpointing_disable()
    policy.model.bfloat16()
    half = needed(policy)
    assert (half["weights"], half["Adam"]) == (2 * weights, 12 * weights)
    assert "\n" not in train.memory_line(train.Config(model="x").resolve(), policy)


def test_memory_estimate_of_activations_is_of_the_right_size():
    """What the backward pass really keeps, counted by autograd's own hooks."""
    policy = Policy(small_llama(hidden_size=64, intermediate_size=192, num_hidden_layers=4), make_tokenizer())
    ids = torch.randint(0, policy.vocab, (4, 128), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(128) % 3 == 1).expand(4, -1)
    own, kept = {p.data_ptr() for p in policy.model.parameters()}, {}
    keep = lambda t: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        policy_module.token_logprobs(policy.model, ids, mask, torch.ones(4, 128))
    real = sum(size for where, size in kept.items() if where not in own)
    assert 0.5 < needed(policy)["activations"] / real < 2


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate")]
)
def test_out_of_memory_ends_with_a_line_that_names_the_flags(train_flags, coins, monkeypatch, capsys, error):
    """A traceback of the allocator tells nobody what to do."""

    def fails(*args):
        raise error

    monkeypatch.setattr(train.Run, "one_update", fails)
    assert train.main(train_flags("run")) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(flag in last for flag in ("--rows", "--micro-tokens", "--gradient-checkpointing", "--dtype"))
    monkeypatch.setattr(train.Run, "one_update", lambda *args: 1 / 0 if isinstance(error, MemoryError) else [][0])
    with pytest.raises((ZeroDivisionError, IndexError)):  # other errors stay what they are
        train.main(train_flags("other"))


# -- L: portability --------------------------------------------------------------------------------------

MODULES = sorted(p for p in ROOT.glob("*.py"))


def calls(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if ast.unparse(node.func) != "os.open":  # that one is about descriptors, not text
                yield name, node


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.name)
def test_files_are_read_and_written_as_utf_8(path):
    """L107: the locale's encoding garbles what a model wrote."""
    for name, node in calls(path):
        if name in ("open", "read_text", "write_text", "opener"):
            modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            binary = any("b" in mode and len(mode) <= 3 for mode in modes)
            assert binary or any(k.arg == "encoding" for k in node.keywords), f"{path.name}:{node.lineno}"


# sandbox.py is refused on Windows, and forks in a helper process that has no threads
@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "sandbox.py"], ids=lambda p: p.name)
def test_no_alarm_and_no_fork(path):
    """L105, L108: time-outs by SIGALRM (not on Windows, not in threads); fork of a process that has threads."""
    names = {node.attr for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)}
    assert not names & {"SIGALRM", "alarm", "setitimer", "fork", "forkpty"}


def test_modules_can_be_imported_by_a_spawned_process():
    """L106: on macOS and Windows a worker imports the main script again."""
    names = ", ".join(p.stem for p in MODULES)
    code = f"import random, torch; a = torch.get_rng_state(), random.getstate(); import {names}; "
    code += "assert torch.equal(torch.get_rng_state(), a[0]) and random.getstate() == a[1]"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_run_under_a_foreign_locale(micro_base, tmp_path):
    """L107: a world's words outside ASCII under LC_ALL=C without UTF-8 mode."""
    flags = [str(word) for word in smallest_run(micro_base, tmp_path / "run", updates=1)]
    script = f"""if True:
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
        import conftest, train
        conftest.play_coins()
        step = conftest.CoinHouse.step
        def odd(self, action):
            observation, *rest = step(self, action)
            return "\u898b \U0001f431 caf\u00e9 " + observation, *rest
        conftest.CoinHouse.step = odd
        sys.exit(train.main({flags!r}))"""
    locale = os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], env=locale, capture_output=True)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")[-2000:]
    with gzip.open(tmp_path / "run" / "episodes.jsonl.gz", "rt", encoding="utf-8") as f:
        assert "\u898b \U0001f431 caf\u00e9" in json.loads(f.readline())["turns"][1]["observation"]
