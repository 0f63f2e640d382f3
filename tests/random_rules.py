"""Random exit rules that the C kernels implement, for property tests."""

import torch
from hypothesis import strategies as st

from twoscale import exits

LOOPS = 7
WEIGHTS = torch.randn(8 * (3 + 2 * 36) + 1, generator=torch.Generator().manual_seed(0)).tolist()
HEADS = [(tuple(WEIGHTS[:n]),) * 3 for n in (7, 8 * (3 + 2 * 32) + 1)]
"""A learned head of each kind for three groups, the second for states of width 32."""


def rules() -> st.SearchStrategy[exits.Rule | None]:
    settings_of_all = {"hits": st.integers(1, 3), "min_steps": st.integers(1, 4), "keep": st.sampled_from(["newest", "previous"])}
    return st.one_of(
        st.none(),
        st.builds(exits.StepNorm, st.sampled_from([0.5, 3.0, 6.0]), st.booleans(), **settings_of_all),
        st.builds(exits.Acceleration, st.sampled_from([0.3, 0.9, 4.0]), st.sampled_from([None, "steps", "state"]), **settings_of_all),
        st.builds(exits.Cosine, st.sampled_from([0.02, 0.2, 0.5]), **settings_of_all),
        st.builds(exits.Fixed, st.integers(1, LOOPS + 1), **settings_of_all),
        st.builds(exits.KL, st.sampled_from([0.01, 0.05, 0.3]), st.booleans(), **settings_of_all),
        st.builds(exits.MinPKL, st.sampled_from([0.01, 0.1]), st.sampled_from([0.1, 0.5]), **settings_of_all),
        st.builds(exits.Entropy, st.sampled_from([0.01, 0.1]), **settings_of_all),
        st.builds(exits.ArgmaxStable, **settings_of_all),
        st.builds(exits.Confidence, st.sampled_from([0.02, 0.1]), **settings_of_all),
        st.builds(exits.Learned, st.sampled_from([0.3, 0.5, 0.7]), weights=st.sampled_from(HEADS), **settings_of_all),
    )
