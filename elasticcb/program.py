from __future__ import annotations
from elasticcb.model_spec import ModelSpec


def open_spec(settings, client):
    return ModelSpec(settings.model)
