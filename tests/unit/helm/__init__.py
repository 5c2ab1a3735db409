"""Tests of the Helm chart: rendered without a cluster, and held against the product."""
