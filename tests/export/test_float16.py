# SPDX-License-Identifier: Apache-2.0
"""float16 graphs with taps as large as real models have them."""

import numpy as np

from dspark_trt.runtime.session import DraftSession
from tests.conftest import ExportBundle
from tests.runtime.golden import golden_rounds

REACH = 3e4  # of the largest tap; float16 ends at 65504 and sums of products lie far beyond
TOLERANCE = 2e-2


def test_official_rounds_with_taps_up_to_3e4(fixture_bundle: ExportBundle) -> None:
    """The norm behind `fc` makes the scale of the taps irrelevant, so the logits must not move."""
    rounds = list(golden_rounds("dspark-vanilla"))
    scale = np.float32(REACH / max(np.abs(golden.taps).max() for golden in rounds))
    worst, compared = 0.0, 0
    with DraftSession.load(
        fixture_bundle("dspark-vanilla", dtype="float16"), slots=3
    ) as session:
        for golden in rounds:
            session.append(golden.prompt, golden.taps * scale, golden.first_row)
            proposal = session.propose([golden.prompt], [golden.anchor])
            assert np.isfinite(proposal.logits).all()
            assert proposal.confidence_logits is not None
            assert golden.confidence_logits is not None
            assert np.isfinite(proposal.confidence_logits).all()
            for slot, official in enumerate(golden.corrected_logits):
                worst = max(worst, float(np.abs(proposal.logits[0, slot] - official).max()))
                ours = proposal.confidence_logits[0, slot]
                assert abs(ours - golden.confidence_logits[slot]) <= TOLERANCE
                compared += 1
                token, wanted = proposal.tokens[0, slot], golden.draft_tokens[slot]
                if token != wanted:  # a near tie; what follows has another past
                    assert official[wanted] - official[token] <= 2 * TOLERANCE
                    break
    assert worst <= TOLERANCE
    assert compared > 0.9 * 7 * len(rounds)
