from angpt.cli.main import main

main()
