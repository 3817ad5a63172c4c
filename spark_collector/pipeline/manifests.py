"""A pipeline as Kubernetes manifests: what the machines of a cluster need instead of `pipeline run`; pure."""

import os
from typing import Any

from brokerless.core.errors import ConfigError
from brokerless.spark_collector.pipeline.commands import collector_commands, job_commands
from brokerless.spark_collector.pipeline.config import LandJob, PipelineConfig

_FILE = "/etc/brokerless/pipeline.toml"


def manifests(config: PipelineConfig, text: str) -> list[dict[str, Any]]:
    """A ConfigMap with the file's `text`, and a StatefulSet for each collector and job.

    Each is one replica: the only writer of its spool or checkpoint, which lies on a volume of its own. Compaction is a
    CronJob. Raises ConfigError where the file cannot work on several machines.
    """
    _check(config)
    base = config.name
    made: list[dict[str, Any]] = [_object("v1", "ConfigMap", base, data={"pipeline.toml": text})]
    for each, command in zip(config.collector, collector_commands(config, _FILE), strict=True):
        assert each.status is not None
        pod = _pod(config, command.arguments, config.kubernetes.image, os.path.dirname(each.spool.path))
        container = pod["containers"][0]
        container["ports"] = [{"name": "http", "containerPort": each.status.port}]
        container["readinessProbe"] = {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 5}
        container["livenessProbe"] = {
            "tcpSocket": {"port": "http"},
            "periodSeconds": 10,
            "failureThreshold": 6,
        }
        made += _stateful(f"{base}-{command.name}", pod, config.kubernetes.storage, each.status.port)
    for job, command in zip([*config.land, *config.loss], job_commands(config), strict=True):
        pod = _pod(config, command.arguments, config.kubernetes.job_image, os.path.dirname(job.checkpoint))
        made += _stateful(f"{base}-{command.name}", pod, config.kubernetes.storage)
    for n, job_ in enumerate(config.compact):
        arguments = ["spark", "compact", "--table", job_.table]
        if job_.vacuum_hours is not None:
            arguments += ["--vacuum", str(job_.vacuum_hours)]
        pod = _pod(config, arguments, config.kubernetes.job_image, "") | {"restartPolicy": "OnFailure"}
        spec = {
            "schedule": _schedule(job_.every_s),
            "concurrencyPolicy": "Forbid",
            "jobTemplate": {"spec": {"template": {"spec": pod}}},
        }
        made.append(_object("batch/v1", "CronJob", f"{base}-compact-{n}", spec=spec))
    return made


def _check(config: PipelineConfig) -> None:
    for each in config.collector:
        if each.spool.remote is None:
            raise ConfigError(
                "collector.spool.remote", f"{each.name} needs one: jobs cannot read another pod's disk"
            )
        if each.status is None or each.status.host != "0.0.0.0":  # noqa: S104  # what a probe needs
            raise ConfigError(
                "collector.status.host", f"of {each.name} must be 0.0.0.0: Kubernetes asks for its health"
            )
    targets = [("land.table", job, job.table) for job in config.land]
    targets += [("loss.ledger", job, job.ledger) for job in config.loss]  # type: ignore[misc]
    for field, job, target in targets:
        iceberg = isinstance(job, LandJob) and job.format == "iceberg"
        if "://" not in target and not iceberg:
            raise ConfigError(field, f"{target} must be a URL of an object store: pods share no directory")
        if not os.path.isabs(job.checkpoint):
            raise ConfigError("checkpoint", f"of {target} must be an absolute path: it becomes a volume")


def _object(version: str, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}


def _pod(config: PipelineConfig, arguments: list[str], image: str, data: str) -> dict[str, Any]:
    mounts = [
        {"name": "config", "mountPath": os.path.dirname(_FILE), "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # Spark's own files
    ]
    if data:
        mounts.append({"name": "data", "mountPath": data})
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "brokerless",
                "image": image,
                "args": arguments,
                "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108
                "envFrom": [{"secretRef": {"name": config.kubernetes.secret, "optional": True}}],
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": mounts,
            }
        ],
        "volumes": [
            {"name": "config", "configMap": {"name": config.name}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _stateful(name: str, pod: dict[str, Any], storage: str, port: int = 0) -> list[dict[str, Any]]:
    labels = {"app": name}
    service: dict[str, Any] = {"clusterIP": "None", "selector": labels}
    if port:
        service["ports"] = [{"name": "http", "port": port}]
    claim = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage}}},
    }
    spec = {
        "serviceName": name,
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [claim],
    }
    return [
        _object("v1", "Service", name, spec=service),
        _object("apps/v1", "StatefulSet", name, spec=spec),
    ]


def _schedule(every_s: float) -> str:
    """The nearest of cron's forms that is not more often: minutes, hours or days."""
    minutes = max(1, -(-every_s // 60))
    if minutes < 60:
        return f"*/{minutes:.0f} * * * *"
    hours = -(-minutes // 60)
    return f"0 */{hours:.0f} * * *" if hours < 24 else "0 3 * * *"
