"""What is around the hook, which imports none of this: commands, comparisons, reports, bench, migration."""
