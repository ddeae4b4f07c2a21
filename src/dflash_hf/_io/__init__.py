"""Files, repositories, the terminal and its errors."""
