"""Writes kv_effivlm.json: what an independent VL-Cache makes of attention weights.

    git clone https://github.com/EffiVLM-Bench/EffiVLM-Bench FOLDER
    PYTHONPATH=tests python tests/golden/kv_effivlm.py FOLDER

Only numbers are kept: that repository has no licence. It sums over a batch, so here it has one.
"""

import importlib
import json
import pathlib
import subprocess
import sys
import types

import torch
from kv_cases import LAYERS, PLACES, K, weights_of_layers

BUDGETS = (0.02, 0.1, 0.4)


class Cache:
    """Keys and values that are the numbers of their places."""

    def __init__(self):
        places = torch.arange(PLACES).float()[None, None, :, None].expand(1, K, PLACES, 1)
        self.key_cache, self.value_cache = [places] * LAYERS, [places] * LAYERS

    def __getitem__(self, layer):
        return self.key_cache[layer], self.value_cache[layer]


def case(cluster):
    """The numbers of one prompt."""
    weights = torch.tensor(weights_of_layers())[:, None]  # a batch of one
    sparsity = tuple(cluster.get_sparsity_layer(x, PLACES, x.shape[2]) for x in weights)
    importance = tuple(cluster.get_token_importance(x) for x in weights)
    cache = Cache()
    shares, order = cluster.get_budget_layer_and_sorted_attn_kv_indices(
        sparsity, importance, LAYERS, cache
    )
    for layer in range(LAYERS):
        cluster.allocate_budget_and_update_kv(shares, order, layer, cache)
    return {
        "budget": cluster.vlcache_alpha_sparsity,
        "sparsity": [x.item() for (x,) in sparsity],
        "shares": shares.tolist(),
        "order": order[:, 0].tolist(),
        "kept": [x[0, :, :, 0].long().tolist() for x in cache.key_cache],
    }


def main(folder):
    sys.modules["flash_attention_softmax_n"] = types.SimpleNamespace(softmax_n=None)
    sys.path.insert(0, folder + "/kv_cache_compression")
    clusters = importlib.import_module("kv_cache_utils").VlCacheKVCluster
    commit = subprocess.run(
        ["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    cases = [case(clusters(budget, True, True, True)) for budget in BUDGETS]
    golden = {
        "source": f"https://github.com/EffiVLM-Bench/EffiVLM-Bench at {commit}, VlCacheKVCluster",
        "order": [[x[:20] for x in layer] for layer in cases[0]["order"]],
        "sparsity": cases[0]["sparsity"],
        "cases": [{name: c[name] for name in ("budget", "shares", "kept")} for c in cases],
    }
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
