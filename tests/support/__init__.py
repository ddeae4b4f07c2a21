"""What tests share: tiny models, rows, stand-ins. No test file imports another one."""
