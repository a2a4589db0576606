"""`python -m kit.train RUN`: train, as one rank of a job."""

from kit.train.trainer import main

main()
