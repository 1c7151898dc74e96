"""Settings of federated training: how a coordinator combines what sites have trained."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FederateConfig:
    """Configures federated training: sites train on data of their own, and a coordinator combines
    their updates, by config.outer, to versions of the shared parameters."""

    sites: int = 0
    """Sets the number of sites of the federation; the default 0 means that the run is not
    federated."""
    rounds: int = 0
    """Sets the number of outer updates after which the federation ends; at least 1."""
    buffer: int = 0
    """Sets the number of accepted updates that make an outer update: 1 applies each at once
    (FedAsync), a number below ``sites`` is FedBuff, and the default 0 waits for all sites
    (synchronous)."""
    max_staleness: int = 0
    """Sets the largest lag of an update that is accepted: the number of outer updates since the
    version that it started from. Later ones are refused, and their site starts again from the
    current version."""
    staleness_exponent: float = 0.5
    """Multiplies the weight of an update of lag n by (1 + n) to minus this power; 0 weights all
    lags alike."""
    weighting: str = "tokens"
    """Chooses by what updates are weighted: the tokens that a site's loss has covered (of pairs,
    the examples), its train steps, or all alike. Allowed values: 'tokens', 'steps', 'uniform'."""
    aggregator: str = "mean"
    """Chooses how the updates of a buffer are combined. All but 'mean' are robust against
    ``byzantine`` poisoned updates, and weight the updates alike. Allowed values: 'mean', 'median',
    'trimmed_mean', 'krum', 'multi_krum'."""
    byzantine: int = 0
    """Sets how many poisoned updates of a buffer a robust ``aggregator`` withstands; 'krum' and
    'multi_krum' need a buffer of at least 2 n + 3, 'trimmed_mean' of 2 n + 1."""
    max_delta_norm: float = 0.0
    """Scales an update down to this global norm; 0 means no clipping."""
    noise_multiplier: float = 0.0
    """Adds Gaussian noise to the mean of an outer update: its standard deviation is this times
    ``max_delta_norm`` divided by the number of updates (client-level differential privacy); 0 adds
    none."""
    privacy_delta: float = 1e-5
    """Sets the delta for which the privacy loss epsilon is reported."""
    min_sites: int = 0
    """Sets how many updates are enough for an outer update after ``deadline_s``; the sites that are
    left out are named."""
    deadline_s: float = 0.0
    """Sets the seconds after the first update of a buffer at which ``min_sites`` are enough; 0
    waits without limit."""
    cache_invalidation: str = "digest"
    """Chooses what an outer update does to a site's cached visual tokens: 'digest' keeps them where
    no parameter of the vision encoder changed, and raises their lag by the number of outer updates
    where one did; 'lazy' raises their lag always; 'flush' makes all of them stale. Allowed values:
    'digest', 'lazy', 'flush'."""
    lora: str = "product"
    """Chooses how adapters are combined: 'product' averages the products of their two matrices and
    takes the best adapter of the same rank, 'freeze_a' does not train the first matrix, so that the
    mean of the second is exact. Allowed values: 'product', 'freeze_a'."""
    mixed_codecs: str = "refuse"
    """Chooses what happens to a site whose cache.codec differs from the federation's: it is
    refused, or, with 'exact', all sites store visual tokens exactly. Allowed values: 'refuse',
    'exact'."""
