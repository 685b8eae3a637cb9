"""What a process reports: log lines, metrics for Prometheus, spans for OpenTelemetry, samples
for readers. Readings and events come in; files and pages go out. Nothing here may slow the work
down.
"""
