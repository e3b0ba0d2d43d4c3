"""The arguments of the SageMaker Python SDK's estimators (PyTorch, HuggingFace, TensorFlow) and of their ``fit``."""

from __future__ import annotations

from collections.abc import Iterable

from smp_core.errors import ArgumentError
from smp_core.launch.distribution import nearest

_WITHOUT_EFFECT = """
    checkpoint_local_path checkpoint_s3_uri code_location compiler_config container_arguments
    container_entry_point container_log_level debugger_hook_config dependencies disable_output_compression
    disable_profiler enable_infra_check enable_network_isolation enable_remote_debug enable_sagemaker_metrics
    enable_session_tag_chaining encrypt_inter_container_traffic framework_version git_config image_uri input_mode
    keep_alive_period_in_seconds max_retry_attempts max_run max_wait metric_definitions model_channel_name model_dir
    model_uri output_kms_key profiler_config py_version pytorch_version recipe_overrides role rules sagemaker_session
    security_group_ids subnets tags tensorboard_output_config tensorflow_version training_recipe
    training_repository_access_mode training_repository_credentials_provider_arn transformers_version
    use_spot_instances volume_kms_key volume_size
"""
#: Arguments of an estimator that have an effect in ``LocalEstimator``.
WITH_EFFECT = (
    *("entry_point", "source_dir", "hyperparameters", "distribution", "instance_type"),
    *("instance_count", "environment", "output_path", "base_job_name"),
)
#: Those that have none.
WITHOUT_EFFECT = tuple(_WITHOUT_EFFECT.split())
#: Arguments of ``fit`` that have no effect in ours.
FIT_WITHOUT_EFFECT = ("experiment_config", "logs", "wait")


def check_names(
    call: str, given: Iterable[str], ignored: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """Raise ArgumentError for a keyword argument that neither SageMaker's call nor ours has.

    Args:
        call: the call, for the message.
        given: the names of its arguments that ours does not declare.
        ignored: those that it takes without effect.
        others: those that it declares.
    """
    for name in given:
        if name not in ignored:
            near = nearest(name, (*others, *ignored)) or "SageMaker's has none of this name either"
            raise ArgumentError(f"{call}: unknown argument {name}: {near}")


def is_set(value: object) -> bool:
    """Return whether an attribute of an estimator says something: it has one for each argument."""
    empty = isinstance(value, str | list | dict) and not value
    return not (value is None or value is False or empty)
