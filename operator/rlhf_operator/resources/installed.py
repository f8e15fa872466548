"""Additions of the installation to every pod of a job: certificate authorities and a cache of models."""

from __future__ import annotations

from typing import Any, Final

from rlhf_operator.settings import Settings

CA_FOLDER: Final = "/rlhf/ca"
CA_FILE: Final = "ca.crt"
MODELS_FOLDER: Final = "/rlhf/models"
CA_VOLUME, MODELS_VOLUME = "rlhf-ca", "rlhf-models"


def variables(settings: Settings) -> dict[str, str]:
    """Return the variables that point libraries to the certificate authorities and to the model cache."""
    authorities = f"{CA_FOLDER}/{CA_FILE}"
    return {
        **({"SSL_CERT_FILE": authorities, "REQUESTS_CA_BUNDLE": authorities} if settings.ca_bundle else {}),
        **({"HF_HUB_CACHE": MODELS_FOLDER} if settings.model_cache else {}),
    }


def volumes(settings: Settings) -> list[dict[str, Any]]:
    """Volumes of a pod for the certificate authorities and the model cache."""
    found: list[dict[str, Any]] = []
    if bundle := settings.ca_bundle:
        items = [{"key": bundle.key, "path": CA_FILE}]
        found.append({"name": CA_VOLUME, "configMap": {"name": bundle.config_map, "items": items}})
    if settings.model_cache:
        found.append({"name": MODELS_VOLUME, **settings.model_cache})
    return found


def mounts(settings: Settings) -> list[dict[str, Any]]:
    """Mounts of a container for the certificate authorities and the model cache."""
    ca = [{"name": CA_VOLUME, "mountPath": CA_FOLDER, "readOnly": True}] if settings.ca_bundle else []
    return [*ca, *([{"name": MODELS_VOLUME, "mountPath": MODELS_FOLDER}] if settings.model_cache else [])]
