"""What a process reports to people: log lines, metrics, spans and samples.

Readings and events come in; files and pages go out. `metric_names` has the table of all metrics,
`metrics` their values, `metrics_page` serves them to Prometheus; `tracing` names spans and chooses
traces, `otel` records and exports them, as `trace_setup` configures it; `samples` writes archives
and dumps; `process` measures this process. Nothing here may slow the work down.
"""
