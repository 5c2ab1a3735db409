"""The Helm chart (`helm/tentalis`) and the script that writes its generated files (`helm.generate`).

In: the applications, ACLs and topics of `tentalis.kafka`, the commands of `tentalis.cli`, and `values.yaml`. Out: the
chart's `files/topology.yaml`, its dashboards, the roles of `values.schema.json` and the README. Begin with `generate`.
"""
