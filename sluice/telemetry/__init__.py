"""What a process reports to people: log lines, metrics, spans and samples.

Readings and events come in; files and pages go out. `metric_names` has the table of all metrics,
`metrics` their values and the page for Prometheus; `tracing` names spans and chooses traces, `otel`
records and exports them, as `trace_setup` configures it; `samples` writes archives and dumps.
Nothing here may slow the work down.
"""
