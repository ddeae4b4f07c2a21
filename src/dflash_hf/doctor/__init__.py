"""Why acceptance is low: experiments on a pair, each a small change under which its drafts are counted again."""
