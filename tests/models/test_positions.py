"""A context length above the model's positions: the error names the scaling that gives them."""

from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, OPTConfig, PretrainedConfig

from llama_ft.errors import UserError
from llama_ft.models.build import resolve_context_length

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def llama(positions: int, **rope: Any) -> PretrainedConfig:
    parameters = {"rope_type": "default", "rope_theta": 1e4, **rope}
    return LlamaConfig(max_position_embeddings=positions, rope_parameters=parameters)


@pytest.mark.parametrize(
    ("config", "positions", "place", "changes"),
    [
        (
            llama(4096),
            12_288,
            "rope_parameters",
            '"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 4096',
        ),
        (llama(4096, **YARN), 10_240, "rope_parameters", '"factor": 10.0'),
        (llama(4096, rope_type="linear", factor=2.0), 10_240, "rope_parameters", '"factor": 5.0'),
        (
            Gemma3TextConfig(max_position_embeddings=8192),
            16_384,
            "rope_parameters.full_attention",
            '"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192',
        ),
    ],
)
def test_a_length_above_the_positions_names_the_rope_scaling_for_it(
    config: PretrainedConfig, positions: int, place: str, changes: str
) -> None:
    expected = f"set max_position_embeddings to {positions}, and in {place} {changes}. Then train"
    with pytest.raises(UserError) as error:
        resolve_context_length(10_000, config)
    assert expected in str(error.value)
    # with these settings the length is accepted
    config.max_position_embeddings = positions
    assert resolve_context_length(10_000, config) == 10_000


def test_learned_positions_cannot_be_scaled() -> None:
    with pytest.raises(UserError, match=r"this model has 2048 positions; use 2048 or less\.$"):
        resolve_context_length(4096, OPTConfig())
