"""No framework: each process takes its share, and is told of no rank."""

from consumed import arguments, consume, loader_named

if __name__ == "__main__":
    args = arguments()
    for name in args.loaders:
        consume(args, name, loader_named(name, args))
