"""Convert a Llama-architecture GGUF file to a transformers folder (safetensors + tokenizer.json).

Called by ``models fetch`` and by the loader. transformers reads GGUF itself, but takes over half a minute for a
135 M model; here only the tensors are de-quantised, once, and everything later loads from safetensors.
Never downloads anything and never writes outside the folder it is given.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adaptive_spec.errors import ModelError

# llama.cpp tensor name -> transformers name; blk.N.* are expanded per layer.
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Pre-tokenizers of GPT-2-style byte-level BPE that split every digit before the byte-level step.
_DIGIT_SPLITTING = frozenset({"smollm"})


def convert_gguf(source: Path, folder: Path, progress: Callable[[str], None] = lambda _: None) -> None:
    """Write ``folder`` as a loadable float16 transformers model from the GGUF file ``source``.

    Raises:
        ModelError: not a GGUF file, or an architecture or tokenizer this converter does not know.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(source))
    except (ValueError, OSError) as error:
        raise ModelError(f"{source} is not a readable GGUF file ({error}). Download it again.") from error
    meta = {name: field for name, field in reader.fields.items()}
    architecture = meta["general.architecture"].contents()
    if architecture != "llama":
        raise ModelError(
            f"{source.name} holds a {architecture!r} model; the converter knows 'llama'. "
            "Convert it with transformers (from_pretrained(gguf_file=...), save_pretrained) and pass the folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    progress("tokenizer")
    _write_tokenizer(meta, folder)
    progress("weights")
    tensors = _tensors(reader, meta)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(meta, tied="lm_head.weight" not in tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _value(meta: dict[str, Any], key: str) -> Any:
    if key not in meta:
        raise ModelError(f"The GGUF file lacks the field {key!r}. Use a file made by a current llama.cpp.")
    return meta[key].contents()


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = _value(meta, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _value(meta, "llama.embedding_length"),
        "intermediate_size": _value(meta, "llama.feed_forward_length"),
        "num_hidden_layers": _value(meta, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _value(meta, "llama.attention.head_count_kv"),
        "max_position_embeddings": _value(meta, "llama.context_length"),
        "rms_norm_eps": _value(meta, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _value(meta, "llama.rope.freq_base")},
        "vocab_size": len(_value(meta, "tokenizer.ggml.tokens")),
        "bos_token_id": _value(meta, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(meta, "tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": tied,
        "dtype": "float16",
    }


def _tensors(reader: Any, meta: dict[str, Any]) -> dict[str, torch.Tensor]:
    from gguf import dequantize

    heads = _value(meta, "llama.attention.head_count")
    kv_heads = _value(meta, "llama.attention.head_count_kv")
    result: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = _transformers_name(tensor.name)
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        if name.endswith("q_proj.weight"):
            weight = _unpermute(weight, heads)
        elif name.endswith("k_proj.weight"):
            weight = _unpermute(weight, kv_heads)
        result[name] = weight.half().contiguous()
    return result


def _transformers_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise ModelError(f"Unknown tensor {name!r} in the GGUF file; convert it with transformers and pass the folder.")


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of the two rotary halves.  weight: [heads * head_dim, hidden]"""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if _value(meta, "tokenizer.ggml.model") != "gpt2":
        raise ModelError("Only byte-level BPE tokenizers are converted; use transformers and pass the folder.")
    tokens: list[str] = _value(meta, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(meta, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    splits = _value(meta, "tokenizer.ggml.pre") in _DIGIT_SPLITTING
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if splits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(meta, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[_value(meta, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_value(meta, "tokenizer.ggml.eos_token_id")],
        pad_token=tokens[_value(meta, "tokenizer.ggml.padding_token_id")],
        clean_up_tokenization_spaces=False,
    )
    if "tokenizer.chat_template" in meta:
        wrapped.chat_template = _value(meta, "tokenizer.chat_template")
    wrapped.save_pretrained(folder)
