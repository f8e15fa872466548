"""The dashboards of the chart, for Grafana; `make generate` writes them as JSON."""
