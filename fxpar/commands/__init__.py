"""The commands of ``fxpar``, one module each: ``add(subparsers)`` declares its flags, ``run(args)`` does the work."""
