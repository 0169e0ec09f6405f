"""Kubernetes: each host is a pod of an Indexed Job."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import PurePath, PurePosixPath
from typing import Any

from optuna_hermes._job_environment import GRACE_VARIABLE
from optuna_hermes._optuna_tables import sqlite_file
from optuna_hermes._programs import ask
from optuna_hermes.errors import ExitStatus, InvalidInputError, LaunchError
from optuna_hermes.launch._base import Host, HostState, Launch, Launcher, at_work
from optuna_hermes.launch._job import Job

CHECKPOINTS = "/checkpoints"
"""Mount path of a claimed volume."""

_CONTAINER = "optimize"
_METRICS_PORT = 9109
_RETRIES = 6
"""Failures of a pod's own command before the job is given up; suspensions do not count."""


class Kubernetes(Launcher):
    """Asks ``kubectl``.

    Args:
        image: with this package, the objective, and what it needs.
        claim: a PersistentVolumeClaim for checkpoints that all pods may write to; none where the
            arguments name an object store.
        namespace: for new jobs, empty for that of kubectl's context.
    """

    name = "kubernetes"

    def __init__(self, *, image: str = "", claim: str = "", namespace: str = "") -> None:
        self._image = image
        self._claim = claim
        self._namespace = namespace

    def render(self, job: Job) -> str:
        import yaml

        manifest = yaml.safe_dump(self.manifest(job), sort_keys=False, width=100)
        kubectl = " ".join(_kubectl(self._namespace))
        # A shell that lacks one, as where --storage was given, refuses, and makes no empty secret.
        values = " ".join(f'--from-literal={each}="${{{each}:?}}"' for each in job.environment)
        return (
            "# `launch` makes the secret, too. If you apply this file yourself, make it by\n"
            f"# {kubectl} create secret generic {job.name}-storage {values}\n{manifest}"
        )

    def manifest(self, job: Job) -> dict[str, Any]:
        """The Job of Kubernetes.

        Raises:
            InvalidInputError: pods would keep no checkpoints or no study, or there is no image.
        """
        if not self._image:
            raise InvalidInputError("A pod needs an image: give one by --image.")
        folder = job.checkpoint_dir
        path = re.sub("^(file|local)://", "", folder)
        if not ("://" in path or self._keeps(path or CHECKPOINTS)):
            got = f" but got --checkpoint-dir {folder}" if folder else ""
            raise InvalidInputError(
                f"A pod's files go with it{got}: name a claim of a volume for checkpoints, "
                f"mounted at {CHECKPOINTS}, by --claim, or an object store by "
                "--checkpoint-dir s3://BUCKET/FOLDER after the `--`."
            )
        # Without a scheme it is the file of a journal.
        file = sqlite_file(job.storage) if "://" in job.storage else job.storage
        if file is not None and not self._keeps(file):
            raise InvalidInputError(
                f"A pod's files go with it but got --storage {job.storage}: keep the study in "
                f"PostgreSQL or MySQL, or in a file below {CHECKPOINTS}, the mount of --claim."
            )
        # Not one for each job: a study that another job goes on with has a folder of its own there.
        more = () if folder else ("--checkpoint-dir", CHECKPOINTS)
        command = ("optuna-hermes", "optimize", *more, *job.command)
        labels = {"app.kubernetes.io/name": "optuna-hermes", "app.kubernetes.io/instance": job.name}
        container: dict[str, Any] = {
            "name": _CONTAINER,
            "image": self._image,
            # A kubelet replaces `$(NAME)` by a variable's value, and `$$` by `$`.
            "command": [word.replace("$", "$$") for word in command],
            "env": [
                *(_secret(each, f"{job.name}-storage") for each in job.environment),
                {"name": GRACE_VARIABLE, "value": str(job.grace_seconds)},
                {"name": "OPTUNA_HERMES_METRICS", "value": f"0.0.0.0:{_METRICS_PORT}"},
            ],
            "ports": [{"name": "metrics", "containerPort": _METRICS_PORT}],
            "livenessProbe": {
                "exec": {"command": ["optuna-hermes", "status", "--probe"]},
                "initialDelaySeconds": 120,
                "periodSeconds": 60,
                "timeoutSeconds": 20,
                "failureThreshold": 5,
            },
        }
        limits = {
            **({"cpu": str(job.cpus)} if job.cpus else {}),
            **({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}),
        }
        if limits:
            container["resources"] = {"limits": limits}
        pod: dict[str, Any] = {
            "restartPolicy": "Never",  # as a policy of failures demands
            "terminationGracePeriodSeconds": job.grace_seconds,
            "containers": [container],
            # Else it has 64 MiB, in which the workers of a loader die.
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        }
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        if self._claim:
            container["volumeMounts"].append({"name": "checkpoints", "mountPath": CHECKPOINTS})
            pod["volumes"].append(
                {"name": "checkpoints", "persistentVolumeClaim": {"claimName": self._claim}}
            )
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job.name, "labels": dict(labels)},
            "spec": {
                "completionMode": "Indexed",
                "completions": job.hosts,
                "parallelism": job.hosts,
                "backoffLimit": _RETRIES * job.hosts,
                "podFailurePolicy": {"rules": _rules()},
                "template": {
                    "metadata": {
                        "labels": labels,
                        "annotations": {
                            "prometheus.io/scrape": "true",
                            "prometheus.io/port": str(_METRICS_PORT),
                        },
                    },
                    "spec": pod,
                },
            },
        }

    def _keeps(self, path: str | PurePath) -> bool:
        """True if a file of a pod is on the claimed volume."""
        return bool(self._claim) and PurePosixPath(path).is_relative_to(CHECKPOINTS)

    def start(self, job: Job) -> Launch:
        manifest = self.render(job)
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{job.name}-storage"},
            "stringData": job.environment,
        }
        launch = Launch(
            launcher=self.name, name=job.name, id=job.name, place=_place(self._namespace)
        )
        kubectl = _kubectl(launch.place)
        if self.is_at_work(launch):  # it is on record on another machine only, or of another user
            by_hand = " ".join([*kubectl, "delete", "job", job.name])
            raise at_work(job.name, f" where it was launched, or by `{by_hand}`")
        # One that has ended was kept to be asked about.
        ask([*kubectl, "delete", "job", job.name, "--ignore-not-found"])
        ask([*kubectl, "apply", "-f", "-"], json.dumps(secret))
        try:
            look = " ".join([*kubectl, "get", "job", job.name])
            ask([*kubectl, "create", "-f", "-"], manifest, look=look)
        except LaunchError:
            with contextlib.suppress(LaunchError):  # nothing on record would lead to it
                ask([*kubectl, "delete", "secret", f"{job.name}-storage", "--ignore-not-found"])
            raise
        return launch

    def is_at_work(self, launch: Launch) -> bool:
        # Of the pods none may be left for minutes, until the job replaces one that has ended.
        words = ["get", "job", launch.id, "--ignore-not-found", "-o", "json"]
        said = ask([*_kubectl(launch.place), *words])
        if not said.strip():
            return False
        conditions = json.loads(said).get("status", {}).get("conditions", ())
        ended = {each["type"] for each in conditions if each["status"] == "True"}
        return not ended & {"Complete", "Failed"}

    def hosts(self, launch: Launch) -> tuple[Host, ...]:
        # Of each index the newest: those that it has replaced have ended, and stay.
        pods = {_index(pod): pod for pod in self._pods(launch)}
        if not pods and self.is_at_work(launch):  # as where a quota is used up
            words = " ".join([*_kubectl(launch.place), "describe", "job", launch.id])
            detail = f"it has no pod: `{words}` says why"
            return (Host(name=launch.id, state="waiting", detail=detail),)
        hosts = (_host(pod) for pod in pods.values())
        return tuple(sorted(hosts, key=lambda each: each.name))

    def _pods(self, launch: Launch) -> list[dict[str, Any]]:
        """The pods of a launch, the oldest first."""
        words = ["get", "pods", "-l", f"job-name={launch.id}", "-o", "json"]
        pods: list[dict[str, Any]] = json.loads(ask([*_kubectl(launch.place), *words]))["items"]
        return sorted(pods, key=lambda each: str(each["metadata"].get("creationTimestamp")))

    def stop(self, launch: Launch) -> None:
        # The pods get SIGTERM and their grace period.
        kubectl = _kubectl(launch.place)
        ask([*kubectl, "delete", "job", launch.id, "--wait=false", "--ignore-not-found"])
        ask([*kubectl, "delete", "secret", f"{launch.id}-storage", "--ignore-not-found"])

    def logs(self, launch: Launch) -> Iterator[str]:
        # Also of pods that were replaced: they say why.
        for host in map(_host, sorted(self._pods(launch), key=_index)):
            if host.state != "waiting":
                try:
                    said = ask([*_kubectl(launch.place), "logs", host.name])
                except LaunchError as error:  # one that was evicted has none
                    said = str(error)
                for line in said.splitlines():
                    yield f"{host.name}: {line}"


def _place(namespace: str) -> str:
    """``CONTEXT/NAMESPACE`` of kubectl: it may have others by the time that the job is stopped."""
    words = "jsonpath={.current-context}/{.contexts[0].context.namespace}"
    try:
        said = ask(["kubectl", "config", "view", "--minify", "-o", words])
    except LaunchError:  # it has no context, as within a pod
        return namespace
    context, _, own = said.rpartition("/")
    return f"{context}/{namespace or own or 'default'}"


def _kubectl(place: str) -> list[str]:
    context, _, namespace = place.rpartition("/")
    return [
        "kubectl",
        *(["--context", context] if context else []),
        *(["--namespace", namespace] if namespace else []),
    ]


def _rules() -> list[dict[str, Any]]:
    def on_exit(action: str, *statuses: int) -> dict[str, Any]:
        wanted = {
            "containerName": _CONTAINER,
            "operator": "In",
            "values": sorted(map(int, statuses)),
        }
        return {"action": action, "onExitCodes": wanted}

    return [
        # Neither a preempted pod nor one that has suspended its trials is a failure.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        on_exit("Ignore", ExitStatus.SUSPENDED),
        on_exit("FailJob", ExitStatus.BAD_INPUT, ExitStatus.NOTHING_SUCCEEDED),
    ]


def _secret(variable: str, name: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": variable}}}


def _index(pod: dict[str, Any]) -> str:
    """The completion index of a pod, which the one that replaces it has, too."""
    told = pod["metadata"].get("annotations", {})
    return str(told.get("batch.kubernetes.io/job-completion-index", pod["metadata"]["name"]))


def _host(pod: dict[str, Any]) -> Host:
    status = pod["status"]
    phases: dict[str, HostState] = {
        "Pending": "waiting", "Running": "running", "Succeeded": "done", "Failed": "failed",
    }  # fmt: skip
    state = phases.get(status.get("phase", ""), "gone")
    ended = [
        each["state"]["terminated"]
        for each in status.get("containerStatuses", ())
        if "terminated" in each.get("state", {})
    ]
    if ended and ended[0].get("exitCode") == ExitStatus.SUSPENDED:
        state = "suspended"
    elif "deletionTimestamp" in pod["metadata"]:
        state = "stopping"
    detail = status.get("reason") or (f"exit status {ended[0]['exitCode']}" if ended else "")
    if state == "waiting":
        detail = detail or _obstacle(status)
    return Host(
        name=pod["metadata"]["name"],
        state=state,
        node=pod["spec"].get("nodeName", ""),
        detail=detail,
    )


def _obstacle(status: dict[str, Any]) -> str:
    """Why a pod does not run yet, in Kubernetes' words, as where no node has room for it."""
    states = (each.get("state", {}) for each in status.get("containerStatuses", ()))
    scheduled = (each for each in status.get("conditions", ()) if each["type"] == "PodScheduled")
    for told in (*(each.get("waiting", {}) for each in states), *scheduled):
        if "reason" in told:
            return ": ".join(told[each] for each in ("reason", "message") if told.get(each))
    return ""
