"""The command line `switchyard`: the operators' calls of the REST API, as tables for people and `--json` for programs.

It needs neither Django nor the database, only the address of a control plane and a key. `api_types` is written from the
API's description by `make openapi`; `client` sends, `commands` says what there is, `tables` prints.
"""
