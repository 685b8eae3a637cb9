"""Test the Helm chart without a cluster: lint it, render it, and compare with golden renders."""
