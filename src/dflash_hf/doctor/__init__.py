"""Why acceptance is low: experiments on a pair, each a small change after which acceptance is measured again."""
