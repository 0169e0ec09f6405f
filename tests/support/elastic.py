"""The elastic jobs of ``benchmarks/``, which are those of traces."""

from __future__ import annotations

from support.benchmarks import benchmark

_applications = benchmark("_elastic_applications")
Application = _applications.Application
Measured = _applications.Measured
StepTime = _applications.StepTime
StepTimes = _applications.StepTimes
Validation = _applications.Validation

ElasticWork = benchmark("_elastic_work").ElasticWork

_files = benchmark("_elastic_files")
read_application = _files.read_application
read_elastic_jobs = _files.read_elastic_jobs
