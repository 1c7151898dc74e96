"""Writes kv_kvpress.json: what kvpress keeps of attention weights that a seed gives.

    pip install kvpress==0.5.5 && PYTHONPATH=tests python tests/golden/kv_kvpress.py

Keys are the numbers of their places, so those that ``compress`` returns tell what it keeps.
"""

import importlib.metadata
import json
import math
import pathlib
import types

import torch
from kv_cases import WINDOW, B, H, K, N, S, queries_and_keys
from kvpress import PyramidKVPress, SnapKVPress, StreamingLLMPress


def attention():
    """Causal attention weights [B, N, S, S] in float64."""
    q, k = (torch.tensor(x).double().transpose(1, 2) for x in queries_and_keys())
    score = q @ k.repeat_interleave(N // K, 1).transpose(2, 3) / math.sqrt(H)
    return torch.where(torch.ones(S, S).tril() > 0, score, -torch.inf).softmax(-1)


def layer(index=0, layers=1):
    config = types.SimpleNamespace(
        num_attention_heads=N, num_key_value_heads=K, num_hidden_layers=layers
    )
    return types.SimpleNamespace(config=config, head_dim=H, layer_idx=index)


def kept(press, weights, module):
    places = torch.arange(S).double()[None, None, :, None].expand(B, K, S, H)
    keys, _ = press.compress(module, torch.zeros(B, S, 1), places, places, weights, {})
    return keys[..., 0].long().sort(-1)[0].tolist()


def snapkv():
    weights, cases = attention(), []
    for kernel, ratio in ((5, 0.5), (5, 0.8), (1, 0.7), (3, 0.6)):
        press = SnapKVPress(ratio, window_size=WINDOW, kernel_size=kernel)
        keys = torch.zeros(B, K, S, H)
        scores = press.score(layer(), torch.zeros(B, S, 1), keys, keys, weights, {})
        cases.append(
            {
                "kernel": kernel,
                "scores": scores[..., :-WINDOW].numpy().round(9).tolist(),
                "kept": kept(press, weights, layer()),
            }
        )
    return cases


def streaming():
    return [kept(StreamingLLMPress(ratio), attention(), layer()) for ratio in (0.25, 0.5, 0.85)]


def pyramid():
    cases = []
    for m in (100, 576, 3000):
        for layers in (5, 28):
            for ratio in (0.3, 0.5, 0.9):
                for window in (8, 64):
                    press = PyramidKVPress(ratio, window_size=window)
                    budgets = [press.get_layer_budget(layer(i, layers), m) for i in range(layers)]
                    cases.append(
                        {"m": m, "budget": round(1 - ratio, 2), "window": window, "kept": budgets}
                    )
    return cases


def main():
    golden = {
        "source": {name: importlib.metadata.version(name) for name in ("kvpress", "torch")},
        "snapkv": snapkv(),
        "streaming": streaming(),
        "pyramid": pyramid(),
    }
    text = json.dumps(golden)
    pathlib.Path(__file__).with_suffix(".json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
