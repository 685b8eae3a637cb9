"""What a process reports to people: log lines, metrics, spans and samples.

Readings and events come in; files and pages go out. `metrics` and `instruments` declare every
metric, `metrics_page` serves them to Prometheus; `tracing` names spans and chooses traces, `otel`
records and exports them; `samples` writes archives and dumps; `process` measures this process.
Nothing here may slow the work down.
"""
