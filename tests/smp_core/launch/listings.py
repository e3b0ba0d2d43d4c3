"""The estimators that AWS's pages list, as data: the arguments as they stand there.

Values that a page leaves open or takes from AWS stand as OPEN.
Sources: AWS Run a Distributed Model Parallel Training Job; AWS Sharded Data Parallelism.
"""

from __future__ import annotations

from typing import Any, NamedTuple

OPEN: Any = object()
INPUTS = "s3://my_bucket/my_training_data/"


class Listing(NamedTuple):
    """The arguments of an estimator, and what a job of it is."""

    arguments: dict[str, Any]
    ranks: int
    parameters: dict[str, Any]
    mpi_options: tuple[str, ...] = ()
    environment: dict[str, str] = {}  # noqa: RUF012 (never changed)


def _job() -> Listing:
    """Launch a Training Job with the SageMaker Python SDK."""
    parameters = {
        "partitions": 2,
        "microbatches": 4,
        "placement_strategy": "spread",
        "pipeline": "interleaved",
        "optimize": "speed",
        "ddp": True,
    }
    smp_options = {"enabled": True, "parameters": parameters}
    mpi_options = {"enabled": True, "processes_per_host": 8}
    return Listing(
        {
            "entry_point": OPEN,
            "source_dir": OPEN,
            "role": OPEN,
            "instance_type": "ml.p3.16xlarge",
            "sagemaker_session": OPEN,
            "framework_version": "1.8.1",
            "py_version": "py36",
            "instance_count": 1,
            "distribution": {"smdistributed": {"modelparallel": smp_options}, "mpi": mpi_options},
            "base_job_name": "SMD-MP-demo",
        },
        8,
        parameters,
    )


def _container() -> Listing:
    """Extend or Adapt A Docker Container; it takes both dicts from the listing above."""
    above = _job()
    distribution = above.arguments["distribution"]
    return Listing(
        {
            "entry_point": OPEN,
            "source_dir": OPEN,
            "role": OPEN,
            "instance_type": "ml.p3.16xlarge",
            "sagemaker_session": OPEN,
            "image_uri": OPEN,
            "instance_count": 1,
            "distribution": {
                "smdistributed": distribution["smdistributed"]["modelparallel"],
                "mpi": distribution["mpi"],
            },
            "base_job_name": "SMD-MP-demo",
        },
        8,
        above.parameters,
    )


def _sharded() -> Listing:
    """Set up the SageMaker PyTorch estimator."""
    parameters = {
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_reduce_bucket_size": int(5e8),
        "sdp_param_persistence_threshold": int(1e6),
        "sdp_max_live_parameters": int(1e9),
        "sdp_hierarchical_allgather": True,
        "sdp_gradient_clipping": 1.0,
    }
    smp_options = {"enabled": True, "parameters": parameters}
    mpi_options = {"enabled": True, "processes_per_host": 8}
    return Listing(
        {
            "entry_point": OPEN,
            "role": OPEN,
            "instance_count": 1,
            "instance_type": "ml.p3.16xlarge",
            "framework_version": "1.13.1",
            "py_version": "py3",
            "distribution": {"smdistributed": {"modelparallel": smp_options}, "mpi": mpi_options},
            "base_job_name": "sharded-data-parallel-job",
        },
        8,
        parameters,
    )


def _smddp() -> Listing:
    """Supported configurations; the comma behind 64 is ours."""
    parameters = {
        "partitions": 1,
        "ddp": True,
        "sharded_data_parallel_degree": 64,
        "bf16": True,
        "ddp_dist_backend": "auto",
    }
    smp_options = {"enabled": True, "parameters": parameters}
    mpi_options = {"enabled": True, "processes_per_host": 8}
    return Listing(
        {
            "entry_point": OPEN,
            "source_dir": OPEN,
            "role": OPEN,
            "instance_count": 8,
            "instance_type": "ml.p4d.24xlarge",
            "framework_version": "1.13.1",
            "py_version": "py3",
            "distribution": {"smdistributed": {"modelparallel": smp_options}, "mpi": mpi_options},
            "base_job_name": "sharded-data-parallel-demo",
        },
        64,
        {**parameters, "ranks_per_node": 8},
    )


def _buffers() -> Listing:
    """Supported configurations, the second listing. The page leaves the configuration open, and appends to a name that
    it never defines: the text says that the options belong to those of MPI.
    """
    above = _smddp()
    mpioptions = ""
    mpioptions += " -x SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES=8192"
    mpioptions += " -x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=8192"
    distribution = dict(above.arguments["distribution"])
    distribution["mpi"] = {**distribution["mpi"], "custom_mpi_options": mpioptions}
    name = "sharded-data-parallel-demo-with-tuning"
    return Listing(
        {**above.arguments, "distribution": distribution, "base_job_name": name},
        64,
        above.parameters,
        environment={
            "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192",
            "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "8192",
        },
    )


def _sixteen_bits(key: str) -> Listing:
    """FP16 training, BF16 training: the options alone."""
    parameters = {"ddp": True, "sharded_data_parallel_degree": 2, key: True}
    smp_options = {"enabled": True, "parameters": parameters}
    mpi_options = {"enabled": True, "processes_per_host": 8}
    distribution = {"smdistributed": {"modelparallel": smp_options}, "mpi": mpi_options}
    return Listing({"entry_point": OPEN, "distribution": distribution}, 8, parameters)


def _tensor() -> Listing:
    """Sharded data parallelism with tensor parallelism."""
    mpi_options = "-verbose --mca orte_base_help_aggregate 0 "
    smp_parameters = {
        "ddp": True,
        "fp16": True,
        "prescaled_batch": True,
        "sharded_data_parallel_degree": 4,
        "tensor_parallel_degree": 4,
    }
    return Listing(
        {
            "entry_point": OPEN,
            "role": OPEN,
            "instance_type": "ml.p4d.24xlarge",
            "volume_size": 200,
            "instance_count": 4,
            "sagemaker_session": OPEN,
            "py_version": "py3",
            "framework_version": "1.13.1",
            "distribution": {
                "smdistributed": {
                    "modelparallel": {
                        "enabled": True,
                        "parameters": smp_parameters,
                    }
                },
                "mpi": {
                    "enabled": True,
                    "processes_per_host": 8,
                    "custom_mpi_options": mpi_options,
                },
            },
            "source_dir": OPEN,
            "output_path": "s3://my_bucket/output",
        },
        32,
        {**smp_parameters, "ranks_per_node": 8},
        mpi_options=("-verbose", "--mca", "orte_base_help_aggregate", "0"),
    )


LISTINGS = {
    "job": _job(),
    "container": _container(),
    "sharded": _sharded(),
    "smddp": _smddp(),
    "buffers": _buffers(),
    "fp16": _sixteen_bits("fp16"),
    "bf16": _sixteen_bits("bf16"),
    "tensor": _tensor(),
}
