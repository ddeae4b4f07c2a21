"""
A target with its drafter: `configs` checks names and configurations before any weights are read, `loading` loads both,
`draft_vocabulary` chooses the tokens that the drafter drafts.
"""
