"""The Helm chart tested without a cluster: linted, rendered, held against schemas and rules."""
