"""What people do with a pair: a server, a chat."""
