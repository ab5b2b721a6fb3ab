from causalqwen_cli.app import main

main()
