/* The background thread's connection to the agent (frame_socket.h). Only that thread uses it; no call waits or takes a
   lock. */
#pragma once

#include "platform/common.h"
#include "platform/frames.h"

/* -1 while there is none. */
int session_socket_file(void);

/* False: nobody is there, or too many are waiting to get in. */
bool session_socket_connect(const char *path);

/* An agent that does not read its frames is as good as gone: false, and the connection is closed. */
bool session_socket_send(struct frame *frame);

/* 1: a frame; 0: none now; -1: the connection is over, or what came is no frame of this version. */
int session_socket_receive(struct frame *frame);

void session_socket_close(void);
