"""What a run says of the routers' auxiliary loss. Its numbers are in test_objective.py, on two
ranks in test_architectures.py."""

import logging
from typing import Any

import pytest
from transformers import AutoConfig

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import build_on_meta, use_router_loss

ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.02}


@pytest.mark.parametrize(
    ("model_type", "settings", "coefficient", "used", "line"),
    [
        ("mixtral", ASKED, None, 0.02, "coefficient 0.02, logged as train/router_aux_loss"),
        ("mixtral", ASKED, 0.3, 0.3, "coefficient 0.3, logged"),
        ("mixtral", ASKED, 0.0, 0.0, ""),
        ("mixtral", {"router_aux_loss_coef": 0.02}, None, 0.0, ""),
        ("jetmoe", {"aux_loss_coef": 0.04}, None, 0.0, ""),
        ("llama4_text", {}, None, 0.0, ""),
        ("llama4_text", {}, 0.3, "Transformers has no such loss for model_type llama4_text", ""),
        ("llama", {}, None, 0.0, ""),
        ("llama", {}, 0.3, "Transformers has no such loss for model_type llama", ""),
    ],
)
def test_the_coefficient_comes_from_the_setting_or_config_json_and_is_logged(
    model_type: str,
    settings: dict[str, Any],
    coefficient: float | None,
    used: float | str,
    line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="llama_ft")
    config = AutoConfig.for_model(model_type, num_hidden_layers=1, **settings)
    model = build_on_meta(config, ModelConfig(model_name=model_type)).model
    if isinstance(used, str):
        with pytest.raises(UserError, match=used):
            use_router_loss(model, coefficient)
        return
    assert use_router_loss(model, coefficient) == used
    assert line in caplog.text and bool(line) == bool(caplog.text)
