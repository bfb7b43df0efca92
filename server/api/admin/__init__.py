"""The routes under ``/admin/v1``: takedowns, jobs, modules, keys and policies, the audit trail, evidence."""
